"""The grouped path of the experts: each of their two layers is one grouped matrix product over all experts.

Whatever stands between the layers is a module, called on all rows at once. Nothing waits for the device, since the
experts' counts stay on it, and autograd and torch.compile know every step.

Axes: T items of N tokens each, A = T * K assignments, D features, H hidden features, E experts, K experts per item.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import GroupedAssignments
from .sorted_path import Operands

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_BYTES = 16  # what a row of each operand is a multiple of


def has_grouped_product(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether torch multiplies stacks (E, out_features, in_features) of a type and of these widths group by group."""
    return dtype in _KERNEL_DTYPES and all(width * dtype.itemsize % _KERNEL_BYTES == 0 for width in shape[1:])


def grouped_experts(operands: Operands, assignments: GroupedAssignments, between: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum over an item's experts of w * (W2 between(W1 x + b1) + b2) (GMoE, equation 2, for any activation).

    Args:
        operands: Items, weights of the outputs, and the experts' parameters.
        assignments: Which item goes to which expert.
        between: (A * N, H) -> the same shape.

    Returns:
        (T, N, D); zeros for an item that went nowhere.
    """
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    tokens, (order, ranks, absent) = x.shape[1], (assignments.order, assignments.ranks, assignments.absent)
    rows = _permuted(x, order, ranks.flatten(), combine_weights.shape[1])
    if absent is not None:
        rows = rows.masked_fill(absent.flatten()[order].view(-1, 1, 1), 0)
    hidden = between(_grouped_linear(rows.flatten(0, 1), weight1, bias1, assignments, tokens))
    outputs = _grouped_linear(hidden.to(x.dtype), weight2, bias2, assignments, tokens).view_as(rows)
    chosen = _permuted(outputs, ranks.flatten(), order, 1).unflatten(0, ranks.shape)
    if absent is not None:
        chosen = chosen.masked_fill(absent[..., None, None], 0)
        combine_weights = combine_weights.masked_fill(absent, 0)
    return (chosen * combine_weights[..., None, None]).sum(1)


def _grouped_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, assignments: GroupedAssignments, tokens: int
) -> Tensor:
    """(A * N, in_features) in the experts' order -> (A * N, out_features)."""
    if has_grouped_product(weight.shape, weight.dtype):
        outputs = F.grouped_mm(rows, weight.mT, offs=assignments.ends * tokens)
    else:
        parts = zip(rows.split([count * tokens for count in assignments.counts()]), weight.unbind(), strict=True)
        outputs = torch.cat([F.linear(own, w) for own, w in parts])
    if bias is None:
        return outputs
    return outputs + F.embedding(assignments.experts.repeat_interleave(tokens), bias)


def _permuted(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Each row of x so many times, in an order of all copies whose inverse is given."""
    rows: Tensor = _Permute.apply(x, order, inverse, copies)
    return rows


class _Permute(torch.autograd.Function):
    """Its gradient is gathered too: in one order on every device, and by all threads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else torch.div(order, copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        rows = _permuted(grad, inverse, order, 1)
        return (rows if ctx.copies == 1 else rows.unflatten(0, (-1, ctx.copies)).sum(1)), None, None, None
