"""Hyper-parameters: those of methods and averages with their ranges, a benchmark's, a random draw, and given values."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
from torch import nn

from ..cli.values import fits
from ..data import seed_hash
from ..errors import ArgumentError
from ..layers import LossWeights

_logger = logging.getLogger(__name__)
Hparams = dict[str, float | int]
Distribution = Callable[[np.random.RandomState], float | int]


def log_uniform(low: float, high: float, kind: type[float] = float) -> Distribution:
    """Distribution of powers of ten whose exponent is uniform."""
    return lambda random: kind(10 ** random.uniform(low, high))


class Range(NamedTuple):
    """A set of numbers."""

    words: str  # its description in a message
    contains: Callable[[float], bool]


SHARE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
POSITIVE = Range("greater than 0", lambda value: value > 0)


class Tunable(nn.Module):
    """A module with hyper-parameters, whose values are in `hparams`.

    Class attributes:
        HPARAMS: Hyper-parameters and their defaults, beside those of the benchmark, by DomainBed's names.
        RANGES: Their ranges; every number of at least 0 for those that are not listed.
    """

    HPARAMS: ClassVar[Mapping[str, float]] = MappingProxyType({})
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({})

    def __init__(self, hparams: Mapping[str, float]) -> None:
        super().__init__()
        self.hparams = {**self.HPARAMS, **hparams}
        for name, allowed in self.RANGES.items():
            if not allowed.contains(self.hparams[name]):
                raise ArgumentError.of("hparams", {name: self.hparams[name]}, f"{name} must be {allowed.words}")


_PHOTOGRAPHS: Mapping[str, Distribution] = {
    "lr": log_uniform(-5, -3.5),
    "weight_decay": log_uniform(-6, -2),
    "batch_size": lambda random: int(2 ** random.uniform(3, 5.5)),
    "resnet_dropout": lambda random: random.choice([0.0, 0.1, 0.5]),
}
_DOMAIN_NET = {**_PHOTOGRAPHS, "batch_size": lambda random: int(2 ** random.uniform(3, 5))}
# DomainBed's ranges for small images, without the batch size: its 2 ** 9 images exceed a domain of these digits
_DIGITS = {**_PHOTOGRAPHS, "lr": log_uniform(-4.5, -2.5), "weight_decay": lambda random: 0.0}
_SMALL_IMAGES = {**_DIGITS, "batch_size": lambda random: int(2 ** random.uniform(3, 9))}

SEARCH_SPACES: Mapping[str, Mapping[str, Distribution]] = MappingProxyType(
    {"photographs": _PHOTOGRAPHS, "domain_net": _DOMAIN_NET, "digits": _DIGITS, "small_images": _SMALL_IMAGES}
)

# Losses of mixtures. MoGE tunes its hyper-parameters by DomainBed's random search without naming them; what is drawn,
# and the ranges around the defaults, are ours.
LOSS_COEFFICIENTS: Mapping[str, float] = MappingProxyType(
    {name: value for name, value in asdict(LossWeights()).items() if value}
)


def _around(default: float, decades: float = 1.0, **_: object) -> Distribution:
    center = math.log10(default)
    return log_uniform(center - decades, center + decades)


_LOSS_RANGES = {
    item.name: _around(LOSS_COEFFICIENTS[item.name], **item.metadata)
    for item in fields(LossWeights)
    if item.name in LOSS_COEFFICIENTS
}


def loss_coefficients(hparams_seed: int, trial_seed: int) -> Mapping[str, float]:
    """Returns the coefficients of the mixtures' losses: defaults for the hyper-parameter seed 0, otherwise a draw."""
    if not hparams_seed:
        return LOSS_COEFFICIENTS
    seed = seed_hash(hparams_seed, trial_seed)
    return {name: draw(np.random.RandomState(seed_hash(seed, name))) for name, draw in _LOSS_RANGES.items()}


def draw_hparams(
    search_space: str,
    *,
    hparams_seed: int,
    trial_seed: int,
    further: Mapping[str, Distribution | str] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Hparams:
    """Draws hyper-parameters under DomainBed's names, number for number as DomainBed draws them.

    Every hyper-parameter has its own generator, seeded with the two seeds and its name, so a draw does not depend on
    the others. `resnet_dropout` is the rate before the classifier of any model. DomainBed draws that of its ViTs
    separately, from the same rates, under the name vit_dropout.

    Args:
        search_space: A name in `SEARCH_SPACES`.
        hparams_seed: Number of the draw; 0 stands for the defaults and is not drawn.
        trial_seed: Repetition of the experiment; every repetition draws anew.
        further: Hyper-parameters of the algorithm, and those of the benchmark that it draws from other ranges. A name
            in place of a distribution stands for the benchmark's hyper-parameter of that name.
        aliases: Names under which DomainBed draws an algorithm's hyper-parameters, if they differ.
    """
    seed, ranges = seed_hash(hparams_seed, trial_seed), SEARCH_SPACES[search_space]
    drawn = {}
    # The algorithm's entries replace the benchmark's of the same name, as DomainBed fixes the batch size of ARM
    for name, entry in {**ranges, **further}.items():
        draw = ranges[entry] if isinstance(entry, str) else entry
        drawn[name] = draw(np.random.RandomState(seed_hash(seed, aliases.get(name, name))))
    # JSON cannot write numpy's numbers
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in drawn.items()}


def resolve_hparams(
    defaults: Mapping[str, float | int], drawn: Mapping[str, float | int], given: Mapping[str, float | int]
) -> Hparams:
    """Merges hyper-parameters: given values win over drawn ones, and those win over the defaults.

    Raises:
        ArgumentError: A given name is not among the defaults, or its value is not a number of the default's kind.
    """
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ArgumentError.of("hparams", dict(given), f"no such {unknown}; choose from {sorted(defaults)}")
    wrong = sorted(name for name, value in given.items() if not _fits(name, value, defaults[name]))
    if wrong:
        raise ArgumentError.of("hparams", dict(given), f"{wrong} must be numbers such as {dict(defaults)}")
    return {**defaults, **drawn, **given}


def _fits(name: str, value: object, default: float | int) -> bool:
    """Whether a value is finite and at least 0, and whole if the default is: from 0 for iterations, else from 1."""
    lowest = 1 if isinstance(default, int) and not _counts_steps(name) else 0
    return fits(value, int if isinstance(default, int) else int | float) and lowest <= value < math.inf  # type: ignore[operator]


def warn_late(hparams: Mapping[str, float | int], steps: int) -> None:
    """Warns of penalties and averages that begin after the last step of a run."""
    for name, value in hparams.items():
        if _counts_steps(name) and value >= steps:
            reason = f"the full penalty or the average begins at this step, and the run ends after {steps}"
            _logger.warning(f"{name}={value}: {reason}; set a smaller one by --hparams, or take more --steps")


def _counts_steps(name: str) -> bool:
    return name.endswith(("_iter", "_iters"))
