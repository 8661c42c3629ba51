"""Dropout of hidden features as a function of a seed: no mask is kept, handed on, or drawn place by place.

Axes: H hidden features.
"""

import math
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import LOST


class HiddenDropout(NamedTuple):
    """Which hidden features are lost.

    Attributes:
        rate: Probability of each by itself, 0 to 1.
        seed: What is lost follows from it and the type of device.
    """

    rate: float
    seed: int

    @property
    def scale(self) -> float:
        """The factor of what is left; 0 where nothing is."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0

    def lost(self, sizes: list[int], width: int, device: torch.device) -> list[Tensor]:
        """What each expert loses of its (rows, H) features, for `lose`: on a CPU their places, elsewhere a mask."""
        generator = torch.Generator(device).manual_seed(self.seed)
        if device.type != "cpu":
            mask = torch.empty(sum(sizes), width, dtype=torch.bool, device=device)
            return list(mask.bernoulli_(self.rate, generator=generator).split(sizes))
        starts = list(accumulate((size * width for size in sizes), initial=0))
        places = lost_places(starts[-1], self.rate, generator)
        bounds = torch.searchsorted(places, torch.tensor(starts, device=device)).tolist()
        return [
            places[begin:end].sub_(start) for start, (begin, end) in zip(starts[:-1], pairwise(bounds), strict=True)
        ]


def lose(features: Tensor, lost: Tensor) -> None:
    """Puts `LOST` at places, or where a mask is true, of (rows, H) features whose last axis is contiguous."""
    if lost.dtype == torch.bool:
        features.masked_fill_(lost, LOST)
    elif len(lost):
        (rows, width), row = features.shape, features.stride(0)
        if row != width:
            lost = lost + lost.div(width, rounding_mode="floor") * (row - width)
        features.as_strided(((rows - 1) * row + width,), (1,)).index_fill_(0, lost, LOST)


def draw_seed() -> Tensor:
    """A seed () int64 by torch's own generator, always on the CPU: reading it waits for no device."""
    return torch.randint(2**63 - 1, (), device="cpu")


def lost_places(size: int, rate: float, generator: torch.Generator) -> Tensor:
    """Places of `size` that are lost, each with probability `rate` by itself; int64, ascending.

    The steps from one lost place to the next have a geometric distribution, so that only they are drawn: on a CPU,
    where one random number is made after another, most of dropout's time.
    """
    if rate >= 1:
        return torch.arange(size, device=generator.device)
    expected = size * rate
    enough = int(expected + 8 * math.sqrt(expected) + 16)  # more than 8 standard deviations, also where there are few
    draws = torch.rand(enough, generator=generator, dtype=torch.float32, device=generator.device)
    draws = draws.clamp_(min=2**-25)  # half of their spacing: none is 0
    steps = draws.log_().div_(math.log1p(-rate)).ceil_().clamp_(max=2.0 * size + 2).long()  # beyond the end is enough
    steps[0] -= 1
    places = steps.cumsum(0)
    return places[: int(torch.searchsorted(places, size))]
