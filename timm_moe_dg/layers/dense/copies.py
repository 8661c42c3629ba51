"""Weights of experts as copies of a dense feed-forward, or of parts of it.

Axes: E experts, D features, H hidden features of the dense feed-forward, h of an expert.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_dense(source: Tensor, num_experts: int, axis: int | None = None, width: int = 0, halves: int = 1) -> Tensor:
    """Copies a dense parameter for each expert.

    Args:
        source: Weight or bias, with hidden features along an axis.
        num_experts: E.
        axis: Axis of the H hidden features: 0 in the first layer, 1 in the second. None for whole copies.
        width: h. Expert e gets the units e h to (e + 1) h - 1, modulo H. Outgoing weights (axis 1) are scaled by H / h,
            so that the mean over experts that cover all units equally often is the dense output.
        halves: 2 if gate and features are one matrix of 2 H.
    """
    if axis is None or source.shape[axis] == width * halves:
        return source.expand(num_experts, *source.shape)
    hidden = source.shape[axis] // halves
    units_Eh = torch.arange(num_experts * width, device=source.device).view(num_experts, width) % hidden
    rows_E = torch.cat([units_Eh + half * hidden for half in range(halves)], dim=1)
    return source[rows_E] if axis == 0 else source[:, rows_E].transpose(0, 1) * (hidden / width)


@torch.no_grad()
def reinitialize(share: float, first: Sequence[Tensor], second: Tensor, halves: int = 1) -> None:
    """Draws a share of each expert's hidden units again, in place (Drop-Upcycling, arXiv:2502.19261, section 3).

    For each expert, floor(share h) units are drawn. Their rows of the `first` matrix and bias (E, h, ...), and columns
    of the `second` matrix (E, D, h), are replaced by normal numbers with the mean and the standard deviation of what
    they replace. With 2 `halves`, gate and features are drawn separately. The paper's layers have no biases.
    """
    num_experts, _, width = second.shape
    for expert in range(num_experts) if share else ():  # share 0 draws no random number
        units = torch.randperm(width, device=second.device)[: int(share * width)]
        parts = [(stack[expert], 0, units + half * width) for stack in first for half in range(halves)]
        for matrix, axis, rows in [*parts, (second[expert], 1, units)] if len(units) else ():
            old = matrix.index_select(axis, rows)
            new = old.mean() + old.std(correction=0) * torch.randn_like(old)
            matrix.index_copy_(axis, rows, new)
