"""The grouped implementation of experts: each of their two layers is one grouped matrix product over all experts.

The path of the items:
1. Sort the assignments by expert, and gather their tokens as rows.
2. Multiply each expert's rows by its first layer, all experts in one product.
3. Apply the activation and all else between the layers, then the second layers.
4. Put the outputs back in the order of the items, and add each item's K outputs with its combine weights.

Whatever is between the layers is a module, called once on all rows. Nothing waits for the device, since the experts'
counts stay there. All steps are supported by autograd and torch.compile.

Axes: T items of N tokens each, A = T * K assignments, D features, H hidden features, E experts, K experts per item.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import is_batch_of_gradients
from .assignments import GroupedAssignments, group_assignments

# What torch's grouped product requires
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KERNEL_BYTES = 16  # every row of an operand is a multiple of it


class ExpertInputs(NamedTuple):
    """The differentiable inputs of a layer's experts, all of one type and on one device."""

    x: Tensor  # (T, N, D) items
    combine_weights: Tensor  # (T, K)
    weight1: Tensor  # (E, G, D)
    bias1: Tensor | None  # (E, G)
    weight2: Tensor  # (E, D, H)
    bias2: Tensor | None  # (E, D)


def has_grouped_product(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Returns whether torch has a grouped product for stacked weights (E, out_features, in_features)."""
    return dtype in _KERNEL_DTYPES and all(width * dtype.itemsize % _KERNEL_BYTES == 0 for width in shape[1:])


def grouped_experts(inputs: ExpertInputs, expert_indices: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
    """Sum over an item's experts of w * (W2 between(W1 x + b1) + b2) (GMoE, equation 2, with any activation).

    Expert indices (T, K) int64 -> (T, N, D), with zeros for an item without experts. The index E marks an assignment
    that goes nowhere. `between` maps (A * N, G) features of the first layer to (A * N, H) of the second.
    """
    x, combine_weights, weight1, bias1, weight2, bias2 = inputs
    assignments = group_assignments(expert_indices, len(weight1))
    tokens, (order, ranks, absent) = x.shape[1], (assignments.order, assignments.ranks, assignments.absent)
    rows = _permute(x, order, ranks.flatten(), combine_weights.shape[1])
    if absent is not None:
        # Assignments that go nowhere pass through the last expert, as zeros and with a weight of 0
        rows = rows.masked_fill(absent.flatten()[order].view(-1, 1, 1), 0)
    hidden = between(_grouped_linear(rows.flatten(0, 1), weight1, bias1, assignments, tokens))
    outputs = _grouped_linear(hidden.to(x.dtype), weight2, bias2, assignments, tokens).view_as(rows)
    chosen = _permute(outputs, ranks.flatten(), order, 1).unflatten(0, ranks.shape)
    if absent is not None:
        chosen = chosen.masked_fill(absent[..., None, None], 0)
        combine_weights = combine_weights.masked_fill(absent, 0)
    return (chosen * combine_weights[..., None, None]).sum(1)


def _grouped_linear(
    rows: Tensor, weight: Tensor, bias: Tensor | None, assignments: GroupedAssignments, tokens: int
) -> Tensor:
    """(A * N, in_features) in expert order -> (A * N, out_features)."""
    if has_grouped_product(weight.shape, weight.dtype):
        outputs = F.grouped_mm(rows, weight.mT, offs=assignments.ends * tokens)
    else:
        parts = zip(rows.split([count * tokens for count in assignments.counts()]), weight.unbind(), strict=True)
        outputs = torch.cat([F.linear(expert_rows, expert_weight) for expert_rows, expert_weight in parts])
    if bias is None:
        return outputs
    return outputs + F.embedding(assignments.experts.repeat_interleave(tokens), bias)


def _permute(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Repeats each row of x `copies` times and permutes the result; `inverse` is the inverse permutation."""
    rows: Tensor = _Permute.apply(x, order, inverse, copies)
    return rows


class _Permute(torch.autograd.Function):
    # index_select's own gradient is index_add_, which is serial on a CPU and has no fixed order on CUDA. This gradient
    # is gathered as well.
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order, inverse)
        ctx.copies = copies
        return x.index_select(0, order if copies == 1 else torch.div(order, copies, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        order, inverse = ctx.saved_tensors
        # Functions of autograd take no batch of gradients
        rows = grad.index_select(0, inverse) if is_batch_of_gradients(grad) else _permute(grad, inverse, order, 1)
        if ctx.copies > 1:
            rows = rows.view(len(order) // ctx.copies, ctx.copies, *rows.shape[1:]).sum(1)
        return rows, None, None, None
