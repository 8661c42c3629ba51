"""Hyper-parameters of a run: the benchmark's defaults, a random draw, and what the user sets."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from ..data import seed_hash
from ..errors import ArgumentError

Hparams = dict[str, float | int]
Distribution = Callable[[np.random.RandomState], float | int]

_PHOTOGRAPHS: Mapping[str, Distribution] = {
    "lr": lambda random: 10 ** random.uniform(-5, -3.5),
    "weight_decay": lambda random: 10 ** random.uniform(-6, -2),
    "batch_size": lambda random: int(2 ** random.uniform(3, 5.5)),
}
_DIGITS: Mapping[str, Distribution] = {
    "lr": lambda random: 10 ** random.uniform(-4.5, -2.5),
    "weight_decay": lambda random: 0.0,
    "batch_size": lambda random: int(2 ** random.uniform(3, 5.5)),
}

SEARCH_SPACES: Mapping[str, Mapping[str, Distribution]] = MappingProxyType(
    {"photographs": _PHOTOGRAPHS, "digits": _DIGITS}
)


def draw_hparams(search_space: str, *, hparams_seed: int, trial_seed: int) -> Hparams:
    """Draws each hyper-parameter of a search space from its own generator, seeded as DomainBed seeds it.

    Args:
        search_space: A name in `SEARCH_SPACES`.
        hparams_seed: Which draw; 0 stands for the defaults and is not drawn.
        trial_seed: Repetition of the experiment; every repetition draws anew.
    """
    seed = seed_hash(hparams_seed, trial_seed)
    return {
        name: draw(np.random.RandomState(seed_hash(seed, name))) for name, draw in SEARCH_SPACES[search_space].items()
    }


def resolve_hparams(defaults: Mapping[str, float | int], drawn: Mapping[str, float | int], given: Mapping) -> Hparams:
    """Merges hyper-parameters; what is given beats what is drawn, and that beats the defaults.

    Args:
        defaults: The benchmark's and the algorithm's; they say which names exist.
        drawn: From `draw_hparams`, or nothing.
        given: From the user.

    Raises:
        ArgumentError: A given name does not exist, or its value is not a number of the default's kind.
    """
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ArgumentError.of("hparams", dict(given), f"no such {unknown}; choose from {sorted(defaults)}")
    wrong = sorted(name for name, value in given.items() if not _same_kind(value, defaults[name]))
    if wrong:
        raise ArgumentError.of("hparams", dict(given), f"{wrong} must be numbers such as {dict(defaults)}")
    return {**defaults, **drawn, **given}


def _same_kind(value: object, default: float | int) -> bool:
    """Whether a value is a non-negative number, and a whole one above zero where the default is whole."""
    if isinstance(default, int):
        return isinstance(value, int) and not isinstance(value, bool) and value > 0
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
