"""SIGTERM, which schedulers send before they end a job: noted when it comes, acted upon when the run can."""

import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from torch import distributed

EXIT_CODE = 128 + signal.SIGTERM  # what shells report for a process that the signal ended
Item = TypeVar("Item")


class Interrupted(Exception):  # noqa: N818 (no mistake of anybody's)
    """The run was asked to end, and has reached a point where it can."""


class Interruption:
    """Notes the signal while it is entered as a context.

    Args:
        num_processes: How many processes have to agree. They do so over gloo, between CPUs, so that an accelerator is
            not waited for.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self._noted = False
        self._group: Any = distributed.new_group(backend="gloo") if num_processes > 1 else None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def agreed(self) -> bool:
        """Whether any process was told to end. All processes have to ask, and get the same answer."""
        if self._group is None:
            return self._noted
        noted = torch.tensor(int(self._noted))
        distributed.all_reduce(noted, distributed.ReduceOp.MAX, group=self._group)
        return bool(noted)

    def breaking(self, items: Iterable[Item]) -> Iterator[Item]:
        """Passes items on until a process was told to end.

        Raises:
            Interrupted: One was.
        """
        for item in items:
            if self.agreed():
                raise Interrupted
            yield item

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
