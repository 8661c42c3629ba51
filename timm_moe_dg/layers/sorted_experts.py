"""All experts of a layer as one function of autograd: assignments sorted by expert, two matrix products for each.

Left to autograd, stacked weights would cost a copy of every expert's gradient into the stack, and GELU's output would
be kept beside its input. Here each result is written where it belongs, one expert's hidden features take the place of
another's, and GELU is computed again in the backward pass.

Axes: T items of N tokens each, A assignments, K experts per item, D features, H hidden features, E experts.
"""

from collections.abc import Iterator
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
        keep: (A * N, H) bool, False for hidden features that dropout takes away; None without dropout.
        scale: Factor of the hidden features that dropout leaves.
    """

    assignments: SortedAssignments
    approximate: str
    keep: Tensor | None
    scale: float

    def parts(self, num_tokens: int) -> Iterator[tuple[int, slice]]:
        """Each expert and its rows among the A * N."""
        stop = 0
        for expert, count in enumerate(self.assignments.counts):
            start, stop = stop, stop + count * num_tokens
            yield expert, slice(start, stop)


def sorted_experts(
    operands: Operands, assignments: SortedAssignments, approximate: str = "none", drop: float = 0.0
) -> Tensor:
    """Sum over an item's experts of w * (W2 dropout(GELU(W1 x + b1)) + b2) (GMoE, equation 2).

    Args:
        operands: Items, weights of the outputs, and the experts' parameters.
        assignments: Which item goes to which expert.
        approximate: GELU's form, 'none' or 'tanh'.
        drop: Dropout rate of the hidden features; 0 outside of training.

    Returns:
        (T, N, D); zeros for an item that went nowhere. It can be differentiated twice.
    """
    plan = Plan(assignments, approximate, None, 1.0)
    if drop > 0:
        rows = len(assignments.items) * operands.x.shape[1]
        keep = operands.x.new_empty(rows, operands.weight1.shape[1], dtype=torch.bool).bernoulli_(1 - drop)
        plan = plan._replace(keep=keep, scale=1 / (1 - drop) if drop < 1 else 0.0)
    if torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands):
        return _SortedExperts.apply(plan, *operands)
    return _forward(operands, plan, keep_hidden=False)[0]


class _SortedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Tensor:
        combined, before, outputs = _forward(Operands(*tensors), plan, keep_hidden=True)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, before, outputs)
        return combined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, before, outputs = ctx.saved_tensors
        operands, needed = Operands(*tensors), Operands(*ctx.needs_input_grad[1:])
        if torch.is_grad_enabled():  # the gradients will be differentiated themselves
            wanted = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
            found = iter(torch.autograd.grad(_by_autograd(operands, ctx.plan), wanted, grads, create_graph=True))
            return None, *(next(found) if need else None for need in needed)
        return None, *_backward(grads[0], operands, ctx.plan, before, outputs, needed)


def _of(stack: Tensor | None, expert: int) -> Tensor | None:
    return None if stack is None else stack[expert]


def _combine(outputs: Tensor, assignments: SortedAssignments, weights: Tensor | None) -> Tensor:
    """(A + 1, N, D), zeros at the end -> (T, N, D): each item's (weighted) sum, always in the same order."""
    sums = F.embedding_bag(assignments.places, outputs.flatten(1), mode="sum", per_sample_weights=weights)
    return sums.view(-1, *outputs.shape[1:])


def _forward(operands: Operands, plan: Plan, keep_hidden: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Combined outputs (T, N, D), features before GELU (A * N, H) if kept, and the experts' outputs (A + 1, N, D)."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    assignments, approximate, keep, scale = plan
    rows = x.index_select(0, assignments.items).flatten(0, 1)
    outputs = x.new_empty(len(assignments.items) + 1, *x.shape[1:])
    outputs[-1] = 0
    largest = x.new_empty(max(assignments.counts) * x.shape[1], weight1.shape[1])
    before = x.new_empty(len(rows), weight1.shape[1]) if keep_hidden else largest
    for expert, part in plan.parts(x.shape[1]):
        hidden = largest[: part.stop - part.start]
        own = before[part] if keep_hidden else hidden
        _linear(rows[part], weight1[expert], _of(bias1, expert), own)
        aten.gelu.out(own, approximate=approximate, out=hidden)
        if keep is not None:
            hidden *= keep[part]
        _linear(hidden, weight2[expert], _of(bias2, expert), outputs.flatten(0, 1)[part], scale)
    return _combine(outputs, assignments, combine_weights), before, outputs


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    """Writes scale * x @ weight.T + bias."""
    if bias is None:
        torch.addmm(out, x, weight.t(), beta=0, alpha=scale, out=out)
    else:
        torch.addmm(bias, x, weight.t(), alpha=scale, out=out)


def _backward(
    grad: Tensor, operands: Operands, plan: Plan, before: Tensor, outputs: Tensor, needed: Operands
) -> tuple[Tensor | None, ...]:
    """The gradients in the operands' order; those of x and of the weights only where needed."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    (positions, items, counts, _), approximate, keep, scale = plan
    grad_outputs = grad.index_select(0, items)
    products = torch.linalg.vecdot(grad_outputs.flatten(1), outputs[:-1].flatten(1))
    grad_combine = torch.zeros_like(combine_weights).view(-1).index_copy_(0, positions, products)
    grad_outputs *= combine_weights.flatten().index_select(0, positions).view(-1, 1, 1)
    grad_rows, rows = grad_outputs.flatten(0, 1), x.index_select(0, items).flatten(0, 1)
    grad_x = torch.empty_like(outputs) if needed.x else None
    grad_weight1, grad_weight2 = (
        torch.empty_like(weight) if need else None
        for weight, need in ((weight1, needed.weight1), (weight2, needed.weight2))
    )
    grad_bias1, grad_bias2 = (None if bias is None else torch.empty_like(bias) for bias in (bias1, bias2))
    largest = [before.new_empty(max(counts) * x.shape[1], before.shape[1]) for _ in range(2)]
    for expert, part in plan.parts(x.shape[1]):
        grad_own, own = grad_rows[part], before[part]
        hidden, grad_hidden = (buffer[: len(own)] for buffer in largest)
        if grad_bias2 is not None:
            torch.sum(grad_own, 0, out=grad_bias2[expert])
        if scale != 1:
            grad_own *= scale
        if grad_weight2 is not None:
            aten.gelu.out(own, approximate=approximate, out=hidden)
            if keep is not None:
                hidden *= keep[part]
            torch.mm(grad_own.t(), hidden, out=grad_weight2[expert])
        torch.mm(grad_own, weight2[expert], out=grad_hidden)
        if keep is not None:
            grad_hidden *= keep[part]
        aten.gelu_backward.grad_input(grad_hidden, own, approximate=approximate, grad_input=grad_hidden)
        if grad_bias1 is not None:
            torch.sum(grad_hidden, 0, out=grad_bias1[expert])
        if grad_weight1 is not None:
            torch.mm(grad_hidden.t(), rows[part], out=grad_weight1[expert])
        if grad_x is not None:
            torch.mm(grad_hidden, weight1[expert], out=grad_x.flatten(0, 1)[part])
    if grad_x is not None:
        grad_x[-1] = 0
        grad_x = _combine(grad_x, plan.assignments, None)
    return grad_x, grad_combine.view_as(combine_weights), grad_weight1, grad_bias1, grad_weight2, grad_bias2


def _by_autograd(operands: Operands, plan: Plan) -> Tensor:
    """The same outputs in steps that autograd knows, for second derivatives."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    rows = x.index_select(0, plan.assignments.items).flatten(0, 1)
    outputs = []
    for expert, part in plan.parts(x.shape[1]):
        hidden = F.gelu(F.linear(rows[part], weight1[expert], _of(bias1, expert)), approximate=plan.approximate)
        if plan.keep is not None:
            hidden = hidden * plan.keep[part] * plan.scale
        outputs.append(F.linear(hidden, weight2[expert], _of(bias2, expert)))
    outputs.append(rows.new_zeros(x.shape[1:]))
    chosen = torch.cat(outputs).view(-1, *x.shape[1:])[plan.assignments.places]
    return (chosen * combine_weights[..., None, None]).sum(1)
