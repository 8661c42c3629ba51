"""Algorithms: what a step minimises, given the model and one minibatch per training domain."""

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import ArgumentError
from .averaging import AVERAGING, Averaging, get_averaging
from .base import Algorithm, Minibatches, Setup, Training
from .erm import ERM

ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType({"ERM": ERM})


def get_algorithm(name: str) -> type[Algorithm]:
    """Looks up an algorithm by its name in `ALGORITHMS`.

    Raises:
        ArgumentError: There is no such algorithm.
    """
    if name not in ALGORITHMS:
        raise ArgumentError.of("algorithm", name, f"choose from {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


__all__ = [
    "ALGORITHMS",
    "AVERAGING",
    "ERM",
    "Algorithm",
    "Averaging",
    "Minibatches",
    "Setup",
    "Training",
    "get_algorithm",
    "get_averaging",
]
