"""Hyper-parameters of methods and averages: which there are, what they may be, and how a random search draws them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
from torch import nn

from ..errors import ArgumentError

# How a random search draws a value; or the benchmark's hyper-parameter whose range, on each benchmark, it shares
Distribution = Callable[[np.random.RandomState], float | int] | str


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


class Tunable(nn.Module):
    """A module with hyper-parameters, whose values are in `hparams`.

    Class attributes:
        HPARAMS: Hyper-parameters and their defaults, beside those of the benchmark; DomainBed's names.
        RANGES: Values that they may have, where that is not every number that is at least 0.

    Args:
        hparams: The run's hyper-parameters, the module's own among them.

    Raises:
        ArgumentError: One is outside its range.
    """

    HPARAMS: ClassVar[Mapping[str, float]] = MappingProxyType({})
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({})

    def __init__(self, hparams: Mapping[str, float]) -> None:
        super().__init__()
        self.hparams = {**self.HPARAMS, **hparams}
        for name, allowed in self.RANGES.items():
            if not allowed.contains(self.hparams[name]):
                raise ArgumentError.of("hparams", {name: self.hparams[name]}, f"{name} must be {allowed.words}")
