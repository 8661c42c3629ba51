"""Values that hyper-parameters may have, where not every number that is at least 0 will do."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..errors import ArgumentError


class Range(NamedTuple):
    """A set of numbers.

    Attributes:
        words: What it is called in a message.
        contains: Whether a number is in it.
    """

    words: str
    contains: Callable[[float], bool]


SHARE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
POSITIVE = Range("greater than 0", lambda value: value > 0)


def check_ranges(hparams: Mapping[str, float], ranges: Mapping[str, Range]) -> None:
    """Makes sure that hyper-parameters have values that can work.

    Raises:
        ArgumentError: One is outside its range.
    """
    for name, allowed in ranges.items():
        if not allowed.contains(hparams[name]):
            raise ArgumentError.of("hparams", {name: hparams[name]}, f"{name} must be {allowed.words}")
