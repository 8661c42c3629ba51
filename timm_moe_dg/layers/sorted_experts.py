"""All experts of a layer as one function of autograd: assignments sorted by expert, two matrix products for each.

Left to autograd, stacked weights would cost a copy of every expert's gradient into the stack, and GELU's output would
be kept beside its input. Here each result is written where it belongs, one expert's hidden features take the place of
another's, and GELU is computed again in the backward pass.

Axes: T items of N tokens each, A assignments, K experts per item, D features, H hidden features, E experts.
"""

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import SortedAssignments

aten = torch.ops.aten  # GELU into a given tensor has no other name


class Operands(NamedTuple):
    """What a layer computes with, all of one type and on one device.

    Attributes:
        x: (T, N, D) items.
        combine_weights: (T, K).
        weight1: (E, H, D).
        bias1: (E, H), or None.
        weight2: (E, D, H).
        bias2: (E, D), or None.
    """

    x: Tensor
    combine_weights: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None


class Plan(NamedTuple):
    """How it computes.

    Attributes:
        assignments: Which item goes to which expert.
        approximate: GELU's form, 'none' or 'tanh'.
        scale: Factor of the hidden features that dropout leaves.
    """

    assignments: SortedAssignments
    approximate: str
    scale: float

    def sizes(self, num_tokens: int) -> list[int]:
        """How many of the A * N rows are each expert's."""
        return [count * num_tokens for count in self.assignments.counts]


def sorted_experts(
    operands: Operands, assignments: SortedAssignments, approximate: str = "none", drop: float = 0.0
) -> Tensor:
    """Sum over an item's experts of w * (W2 dropout(GELU(W1 x + b1)) + b2) (GMoE, equation 2).

    Args:
        operands: Items, weights of the outputs, and the experts' parameters.
        assignments: Which item goes to which expert.
        approximate: GELU's form, 'none' or 'tanh'.
        drop: Dropout rate of the hidden features, in steps of 2^-16; 0 outside of training.

    Returns:
        (T, N, D); zeros for an item that went nowhere. It can be differentiated twice, but not in batches of gradients.
    """
    x, combine_weights = operands.x, operands.combine_weights
    if len(assignments.items) < combine_weights.numel():
        nowhere = assignments.places == len(assignments.items)  # where a weight may be NaN, which times zero is NaN
        operands = operands._replace(combine_weights=combine_weights.masked_fill(nowhere, 0))
    keep, scale = None, 1.0
    if drop > 0:
        keep, scale = _draw_dropout((len(assignments.items) * x.shape[1], operands.weight1.shape[1]), drop, x.device)
    plan = Plan(assignments, approximate, scale)
    if torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands):
        sums: Tensor = _SortedExperts.apply(plan, keep, *operands)
    else:
        sums = _forward(plan, keep, operands, for_backward=False)[0]
    return sums.view(x.shape)


def _draw_dropout(shape: tuple[int, int], drop: float, device: torch.device) -> tuple[Tensor, float]:
    """A mask, False with probability `drop`, and the factor of what it keeps.

    Four places share one random integer of 64 bits; on a CPU that takes a fifth of bernoulli_'s time.
    """
    steps = max(1, round(drop * 2**16))
    size = shape[0] * shape[1]
    draws = torch.empty(-(-size // 4), dtype=torch.int64, device=device).random_(-(2**63), None)
    keep = draws.view(torch.int16)[:size].view(shape) > steps - 2**15 - 1
    return keep, 2**16 / (2**16 - steps) if steps < 2**16 else 0.0


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, keep: Tensor | None, *tensors: Any) -> Tensor:
        sums, *kept = _forward(plan, keep, Operands(*tensors), for_backward=True)
        ctx.plan = plan
        ctx.save_for_backward(keep, *tensors, *kept)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        keep, *tensors, rows, before, outputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        with torch.autocast(grads[0].device.type, enabled=False):
            if torch.is_grad_enabled():  # the gradients will be differentiated themselves
                # Views, since one operand may be computed from another: autograd is to stop at each of them
                views: list[Any] = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
                operands = Operands(*views)
                wanted = [
                    operand for operand, need in zip(operands, needed, strict=True) if operand is not None and need
                ]
                sums = _by_autograd(ctx.plan, keep, operands)
                found = iter(torch.autograd.grad(sums, wanted, grads, create_graph=True))
                return None, None, *(next(found) if need else None for need in needed)
            return None, None, *_backward(ctx.plan, keep, Operands(*tensors), rows, before, outputs, grads[0], needed)


def _per_expert(tensor: Tensor | None, sizes: list[int] | None = None) -> Iterable[Any]:
    """One view for each expert: of a stack, or of rows where their numbers are given; None each of what is absent."""
    if tensor is None:
        return itertools.repeat(None)
    return tensor.unbind() if sizes is None else tensor.split(sizes)


def _combine(outputs: Tensor, assignments: SortedAssignments, weights: Tensor | None) -> Tensor:
    """(A + 1, N, D), zeros at the end -> (T, N * D): each item's (weighted) sum.

    Unlike adding the outputs to their items, this has one order of summands on every device.
    """
    return F.embedding_bag(assignments.places, outputs.flatten(1), mode="sum", per_sample_weights=weights)


def _forward(
    plan: Plan, keep: Tensor | None, operands: Operands, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Sums (T, N * D), rows (A * N, D), features before GELU (A * N, H) if kept, the experts' outputs (A + 1, N, D)."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    assignments, approximate, scale = plan
    sizes = plan.sizes(x.shape[1])
    rows = x.index_select(0, assignments.items).flatten(0, 1)
    outputs = x.new_empty(len(assignments.items) + 1, *x.shape[1:])
    outputs[-1] = 0
    buffer = x.new_empty(max(sizes), weight1.shape[1])
    before = x.new_empty(len(rows), weight1.shape[1]) if for_backward else None
    for own_rows, own_before, own_keep, own_outputs, w1, b1, w2, b2 in zip(
        rows.split(sizes),
        _per_expert(before, sizes),
        _per_expert(keep, sizes),
        outputs[:-1].flatten(0, 1).split(sizes),
        weight1.mT,
        _per_expert(bias1),
        weight2.mT,
        _per_expert(bias2),
        strict=False,
    ):
        hidden = buffer[: len(own_rows)]
        before_gelu = hidden if own_before is None else own_before  # GELU is computed in place if nothing is kept
        _linear(own_rows, w1, b1, before_gelu)
        aten.gelu.out(before_gelu, approximate=approximate, out=hidden)
        if own_keep is not None:
            hidden *= own_keep
        _linear(hidden, w2, b2, own_outputs, scale)
    return _combine(outputs, assignments, combine_weights), rows, before, outputs


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    """Writes scale * x @ weight + bias."""
    if bias is None:
        torch.addmm(out, x, weight, beta=0, alpha=scale, out=out)
    else:
        torch.addmm(bias, x, weight, alpha=scale, out=out)


def _backward(
    plan: Plan,
    keep: Tensor | None,
    operands: Operands,
    rows: Tensor,
    before: Tensor,
    outputs: Tensor,
    grad: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients in the operands' order, given that of the sums; None where not needed (small ones may be there)."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    needs_x, needs_combine, needs_weight1, _, needs_weight2, _ = needed
    (positions, items, _, _), approximate, scale = plan
    grad_outputs = grad.reshape(x.shape).index_select(0, items)
    grad_combine = None
    if needs_combine:
        products = torch.linalg.vecdot(grad_outputs.flatten(1), outputs[:-1].flatten(1))
        grad_combine = products.new_zeros(combine_weights.numel()).index_copy_(0, positions, products)
        grad_combine = grad_combine.view(combine_weights.shape)
    grad_outputs *= combine_weights.flatten().index_select(0, positions).view(-1, 1, 1)
    sizes = plan.sizes(x.shape[1])
    grad_x = torch.empty_like(outputs) if needs_x else None
    grad_weight1 = torch.empty_like(weight1) if needs_weight1 else None
    grad_weight2 = torch.empty_like(weight2) if needs_weight2 else None
    grad_bias1, grad_bias2 = (None if bias is None else torch.empty_like(bias) for bias in (bias1, bias2))
    buffers = [before.new_empty(max(sizes), before.shape[1]) for _ in range(2)]
    for grad_own, own_rows, before_gelu, own_keep, grad_own_x, w1, grad_w1, grad_b1, w2, grad_w2, grad_b2 in zip(
        grad_outputs.flatten(0, 1).split(sizes),
        rows.split(sizes),
        before.split(sizes),
        _per_expert(keep, sizes),
        _per_expert(None if grad_x is None else grad_x[:-1].flatten(0, 1), sizes),
        weight1,
        _per_expert(grad_weight1),
        _per_expert(grad_bias1),
        weight2,
        _per_expert(grad_weight2),
        _per_expert(grad_bias2),
        strict=False,
    ):
        hidden, grad_hidden = (buffer[: len(grad_own)] for buffer in buffers)
        if grad_b2 is not None:
            torch.sum(grad_own, 0, out=grad_b2)
        if scale != 1:
            grad_own *= scale
        torch.mm(grad_own, w2, out=grad_hidden)
        if own_keep is not None:
            grad_hidden *= own_keep
        if grad_w2 is not None:
            aten.gelu.out(before_gelu, approximate=approximate, out=hidden)
            if own_keep is not None:
                hidden *= own_keep
        aten.gelu_backward.grad_input(grad_hidden, before_gelu, approximate=approximate, grad_input=grad_hidden)
        if grad_w2 is not None:
            torch.mm(grad_own.t(), hidden, out=grad_w2)
        if grad_b1 is not None:
            torch.sum(grad_hidden, 0, out=grad_b1)
        if grad_w1 is not None:
            torch.mm(grad_hidden.t(), own_rows, out=grad_w1)
        if grad_own_x is not None:
            torch.mm(grad_hidden, w1, out=grad_own_x)
    if grad_x is not None:
        grad_x[-1] = 0
        grad_x = _combine(grad_x, plan.assignments, None).view(x.shape)
    return grad_x, grad_combine, grad_weight1, grad_bias1, grad_weight2, grad_bias2


def _by_autograd(plan: Plan, keep: Tensor | None, operands: Operands) -> Tensor:
    """The same sums in steps that autograd knows, for second derivatives."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    sizes = plan.sizes(x.shape[1])
    rows = x.index_select(0, plan.assignments.items).flatten(0, 1).split(sizes)
    outputs = []
    for own_rows, own_keep, w1, b1, w2, b2 in zip(
        rows,
        _per_expert(keep, sizes),
        weight1,
        _per_expert(bias1),
        weight2,
        _per_expert(bias2),
        strict=False,
    ):
        hidden = F.gelu(F.linear(own_rows, w1, b1), approximate=plan.approximate)
        if own_keep is not None:
            hidden = hidden * own_keep * plan.scale
        outputs.append(F.linear(hidden, w2, b2))
    outputs.append(x.new_zeros(x.shape[1:]))
    chosen = torch.cat(outputs).view(-1, *x.shape[1:])[plan.assignments.places]
    return (chosen * combine_weights[..., None, None]).sum(1).flatten(1)
