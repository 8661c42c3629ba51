"""Dropout that is fast on a CPU, because random numbers are drawn for the dropped features alone."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def sampled_dropout(x: Tensor, rate: float) -> Tensor:
    """Drops each feature with probability `rate`, and scales the others by 1 / (1 - rate), as `F.dropout` does."""
    if x.device.type != "cpu" or not 0 < rate < 1:
        return F.dropout(x, rate)
    return x * dropout_factors(x.detach(), rate)


# An operator, because torch.compile cannot trace positions whose number is random. The tag keeps two calls from
# becoming one. A checkpointed block repeats the call with the generator's saved state.
@torch.library.custom_op("timm_moe_dg::dropout_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_factors(like: Tensor, rate: float) -> Tensor:
    """Draws a factor for each feature: 0 with probability `rate`, else 1 / (1 - rate)."""
    factors = torch.full_like(like, 1 / (1 - rate), memory_format=torch.contiguous_format)
    factors.view(-1).index_fill_(0, dropped_positions(factors.numel(), rate), 0)
    return factors


@dropout_factors.register_fake
def _(like: Tensor, rate: float) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def dropped_positions(size: int, rate: float) -> Tensor:
    """Draws the positions 0..size - 1 that are dropped, each independently with probability `rate`; ascending int64."""
    # The distance from one dropped position to the next has a geometric distribution
    expected = size * rate
    count = int(expected + 8 * math.sqrt(expected) + 16)  # beyond 8 standard deviations, also for small `expected`
    uniform = torch.rand(count, dtype=torch.float32, device="cpu").clamp_(min=2**-25)  # avoids log(0)
    steps = uniform.log_().div_(math.log1p(-rate)).ceil_().clamp_(max=2.0 * size + 2).long()  # avoids overflow
    steps[0] -= 1
    positions = steps.cumsum(0)
    return positions[: int(torch.searchsorted(positions, size))]
