"""Many texts, such as the paths of a data set's images, in two objects.

A list of a million paths is a million objects, of twice the memory. Worse, each worker of a loader makes its own copy:
Python counts references within the objects, so that looking at one writes to a page that was shared until then.
"""

import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import TypeVar, cast, overload

import numpy as np

_CHUNK = 10_000

Stored = TypeVar("Stored")


class Texts(Sequence[str]):
    """A sequence of texts, equal to every sequence of the same texts.

    Args:
        texts: In their order; read once. Those of the file system may stand for names that are not UTF-8.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._joined, self._ends = bytearray(), array("q", [0])
        self.extend(texts)

    def extend(self, texts: Iterable[str]) -> None:
        """Appends texts."""
        waiting = iter(texts)
        while parts := [text.encode("utf-8", "surrogateescape") for text in islice(waiting, _CHUNK)]:
            self._ends.extend(accumulate(map(len, parts[1:]), initial=len(self._joined) + len(parts[0])))
            self._joined += b"".join(parts)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> "Texts": ...

    def __getitem__(self, index: int | slice) -> "str | Texts":
        if isinstance(index, slice):
            return Texts(map(self._at, range(len(self))[index]))
        return self._at(range(len(self))[index])

    def take(self, positions: np.ndarray) -> "Texts":
        """Returns the texts at some positions, in their order."""
        return Texts(map(self._at, positions.tolist()))

    def __iter__(self) -> Iterator[str]:
        return (self._joined[first:end].decode("utf-8", "surrogateescape") for first, end in pairwise(self._ends))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def _at(self, position: int) -> str:
        return self._joined[self._ends[position] : self._ends[position + 1]].decode("utf-8", "surrogateescape")


@overload
def take(column: np.ndarray, positions: np.ndarray) -> np.ndarray: ...


@overload
def take(column: Sequence[Stored], positions: np.ndarray) -> Sequence[Stored]: ...


def take(column: Sequence[Stored] | np.ndarray, positions: np.ndarray) -> Sequence[Stored] | np.ndarray:
    """Returns the entries at some positions, as the column keeps them: arrays and texts as such, else as a list."""
    if isinstance(column, np.ndarray):
        return column[positions]
    if isinstance(column, Texts):
        return cast(Sequence[Stored], column.take(positions))
    return [column[position] for position in positions.tolist()]
