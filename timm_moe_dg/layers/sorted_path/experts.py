"""All experts of a layer as one function of autograd: assignments sorted by expert, two matrix products for each.

Left to autograd, stacked weights would cost a copy of every expert's gradient into the stack, and the activation's
output would be kept beside its input. Here each result is written where it belongs, one expert's hidden features take
the place of another's, and the activation is computed again in the backward pass.

Axes: T items of N tokens each, A assignments, K experts per item, D features, H hidden features, G of them before the
activation (H, or 2 H where that is gated), E experts.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import SortedAssignments
from ..precision import without_autocast
from .activations import SortedActivation
from .dropout import HiddenDropout, draw_seed, lose


class Operands(NamedTuple):
    """What a layer computes with, all of one type and on one device.

    Attributes:
        x: (T, N, D) items.
        combine_weights: (T, K).
        weight1: (E, G, D).
        bias1: (E, G), or None.
        weight2: (E, D, H).
        bias2: (E, D), or None.
    """

    x: Tensor
    combine_weights: Tensor
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None


class Kept(NamedTuple):
    """What the forward pass leaves for the backward pass.

    Attributes:
        rows: (A * N, D) tokens in the experts' order.
        pre_activation: (A * N, G) hidden features before the activation, those that dropout loses far below zero; None
            if no backward pass follows.
        outputs: (A + 1, N, D) the experts' outputs, zeros at the end.
    """

    rows: Tensor
    pre_activation: Tensor | None
    outputs: Tensor

    @classmethod
    def of(cls, assignments: SortedAssignments, x: Tensor, pre_activation: Tensor | None, outputs: Tensor) -> "Kept":
        """The rows, and what A assignments fill of `room_for` as many or more."""
        rows = x.index_select(0, assignments.items).flatten(0, 1)
        features = None if pre_activation is None else pre_activation[: len(rows)]
        return cls(rows, features, outputs[: len(assignments.items) + 1])


def room_for(x: Tensor, weight1: Tensor, num_assignments: int) -> tuple[Tensor, Tensor]:
    """Room for the features before the activation, and for the experts' outputs."""
    return x.new_empty(num_assignments * x.shape[1], weight1.shape[1]), _new_outputs(x, num_assignments)


def _new_outputs(x: Tensor, num_assignments: int) -> Tensor:
    """Room for the experts' outputs, and zeros at the end."""
    return x.new_empty(num_assignments + 1, *x.shape[1:])


class Plan(NamedTuple):
    """How it computes.

    Attributes:
        assignments: Which item goes to which expert.
        activation: Of the hidden features.
        dropout: Of them; None for none.
    """

    assignments: SortedAssignments
    activation: SortedActivation
    dropout: HiddenDropout | None

    @property
    def scale(self) -> float:
        """Factor of the hidden features that dropout leaves."""
        return 1.0 if self.dropout is None else self.dropout.scale

    def sizes(self, num_tokens: int) -> list[int]:
        """How many of the A * N rows are each expert's."""
        return [count * num_tokens for count in self.assignments.counts]


def sorted_experts(
    operands: Operands,
    assignments: SortedAssignments,
    activation: SortedActivation = SortedActivation(),  # noqa: B008 (it cannot change)
    drop: float = 0.0,
) -> Tensor:
    """Sum over an item's experts of w * (W2 dropout(act(W1 x + b1)) + b2) (GMoE, equation 2).

    Args:
        operands: Items, weights of the outputs, and the experts' parameters.
        assignments: Which item goes to which expert.
        activation: Of the hidden features.
        drop: Dropout rate of the hidden features; 0 outside of training.

    Returns:
        (T, N, D); zeros for an item that went nowhere. Supports double backward, but not batched gradients.
    """
    x = operands.x
    operands = operands._replace(combine_weights=known_weights(assignments, operands.combine_weights))
    dropout = HiddenDropout(drop, int(draw_seed())) if drop > 0 else None
    plan = Plan(assignments, activation, dropout)
    sums: Tensor = (
        _SortedExperts.apply(plan, *operands) if gradients_follow(operands) else forward_alone(plan, operands)
    )
    return sums.view(x.shape)


def gradients_follow(operands: Operands) -> bool:
    """Whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def known_weights(assignments: SortedAssignments, weights: Tensor) -> Tensor:
    """(T, K), 0 for assignments that go nowhere, where a weight may be NaN, which times zero is NaN."""
    if len(assignments.items) == weights.numel():
        return weights
    return weights.masked_fill(assignments.ranks == len(assignments.items), 0)


class _SortedExperts(torch.autograd.Function):
    # `ctx` is Any: torch's own class does not declare what it carries
    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Tensor:
        operands = Operands(*tensors)
        room = room_for(operands.x, operands.weight1, len(plan.assignments.items))
        kept = Kept.of(plan.assignments, operands.x, *room)
        sums = forward_into(plan, operands, kept)
        ctx.plan = plan
        ctx.save_for_backward(*operands, *kept)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: under checkpointing, unpacking computes
        operands, kept = Operands(*saved[:6]), Kept(*saved[6:])
        needed = ctx.needs_input_grad[1:]
        with without_autocast(grad.device.type):
            if torch.is_grad_enabled():  # the gradients will be differentiated themselves
                return None, *_differentiable_backward(ctx.plan, operands, kept, grad, needed)
            return None, *backward_of(ctx.plan, operands, kept, grad, needed)


def _rows_of(tensor: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    """Each expert's rows; None each where the tensor is absent."""
    return (None,) * len(sizes) if tensor is None else tensor.split(sizes)


def _part_of(tensor: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    """Each expert's part of a stack (E, ...); None each where the stack is absent."""
    return (None,) * len(sizes) if tensor is None else tensor.unbind()


def combine(outputs: Tensor, assignments: SortedAssignments, weights: Tensor | None) -> Tensor:
    """(A + 1, N, D), zeros at the end -> (T, N * D): each item's (weighted) sum.

    Unlike adding the outputs to their items, this has one order of summands on every device.
    """
    rows = outputs.flatten(1)
    if rows.shape[1] == 0:  # items without tokens, which embedding_bag does not take
        return rows.new_zeros(len(assignments.ranks), 0)
    return F.embedding_bag(assignments.ranks, rows, mode="sum", per_sample_weights=weights)


def forward_alone(plan: Plan, operands: Operands) -> Tensor:
    """Sums (T, N * D), and nothing for a backward pass."""
    x, assignments = operands.x, plan.assignments
    kept = Kept.of(assignments, x, None, _new_outputs(x, len(assignments.items)))
    return forward_into(plan, operands, kept)


def forward_into(plan: Plan, operands: Operands, kept: Kept) -> Tensor:
    """Sums (T, N * D); fills what is kept."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    assignments, activation, dropout = plan
    rows, pre_activation, outputs = kept
    sizes = plan.sizes(x.shape[1])
    outputs[-1] = 0
    # In place if nothing is kept
    width = weight2.shape[2] if pre_activation is not None else weight1.shape[1]
    buffer = x.new_empty(max(sizes), width)
    lost = (None,) * len(sizes) if dropout is None else dropout.lost(sizes, weight2.shape[2], x.device)
    for own_rows, own_pre_activation, own_lost, own_outputs, w1, b1, w2, b2 in zip(
        rows.split(sizes),
        _rows_of(pre_activation, sizes),
        lost,
        outputs[:-1].flatten(0, 1).split(sizes),
        weight1.mT,
        _part_of(bias1, sizes),
        weight2.mT,
        _part_of(bias2, sizes),
        strict=True,
    ):
        hidden = buffer[: len(own_rows)]
        if own_pre_activation is None:
            own_pre_activation, (hidden, _) = hidden, activation.halves(hidden)
        linear_into(own_rows, w1, b1, own_pre_activation)
        if own_lost is not None:
            lose(activation.halves(own_pre_activation)[0], own_lost)
        activation.into(own_pre_activation, hidden)
        linear_into(hidden, w2, b2, own_outputs, plan.scale)
    return combine(outputs, assignments, combine_weights)


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    """Writes scale * x @ weight + bias."""
    if bias is None:
        torch.addmm(out, x, weight, beta=0, alpha=scale, out=out)
    else:
        torch.addmm(bias, x, weight, alpha=scale, out=out)


class _ExpertViews(NamedTuple):
    """One expert's part of each tensor in the backward pass; None for what is absent or not needed."""

    grad_outputs: Tensor
    rows: Tensor
    pre_activation: Tensor
    weight1: Tensor
    weight2: Tensor
    grad_x: Tensor | None
    grad_weight1: Tensor | None
    grad_bias1: Tensor | None
    grad_weight2: Tensor | None
    grad_bias2: Tensor | None


def backward_of(
    plan: Plan, operands: Operands, kept: Kept, grad: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients in the operands' order, given that of the sums; None where not needed (small ones may be there)."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    needs_x, needs_combine, needs_weight1, _, needs_weight2, _ = needed
    grad_outputs = grad.reshape(x.shape).index_select(0, plan.assignments.items)
    grad_combine = (
        _grad_combine(plan.assignments, grad_outputs, kept.outputs, combine_weights) if needs_combine else None
    )
    grad_outputs *= combine_weights.flatten().index_select(0, plan.assignments.positions).view(-1, 1, 1)
    assert kept.pre_activation is not None
    sizes = plan.sizes(x.shape[1])
    grad_rows = torch.empty_like(kept.outputs) if needs_x else None
    grad_weight1 = torch.empty_like(weight1) if needs_weight1 else None
    grad_weight2 = torch.empty_like(weight2) if needs_weight2 else None
    grad_bias1, grad_bias2 = (None if bias is None else torch.empty_like(bias) for bias in (bias1, bias2))
    widths = (weight2.shape[2], weight2.shape[2], weight1.shape[1])
    buffers = [x.new_empty(max(sizes), width) for width in widths[: 2 if plan.activation.gate is None else 3]]
    for views in map(
        _ExpertViews,
        grad_outputs.flatten(0, 1).split(sizes),
        kept.rows.split(sizes),
        kept.pre_activation.split(sizes),
        weight1.unbind(),
        weight2.unbind(),
        _rows_of(None if grad_rows is None else grad_rows[:-1].flatten(0, 1), sizes),
        _part_of(grad_weight1, sizes),
        _part_of(grad_bias1, sizes),
        _part_of(grad_weight2, sizes),
        _part_of(grad_bias2, sizes),
    ):
        _expert_backward(plan, views, *(buffer[: len(views.rows)] for buffer in buffers))
    grad_x = None
    if grad_rows is not None:
        grad_rows[-1] = 0
        grad_x = combine(grad_rows, plan.assignments, None).view(x.shape)
    return grad_x, grad_combine, grad_weight1, grad_bias1, grad_weight2, grad_bias2


def _grad_combine(
    assignments: SortedAssignments, grad_outputs: Tensor, outputs: Tensor, combine_weights: Tensor
) -> Tensor:
    """(T, K): each assignment's output times the gradient that reaches its item; 0 for one that went nowhere."""
    products = torch.linalg.vecdot(grad_outputs.flatten(1), outputs[:-1].flatten(1))
    grad_combine = products.new_zeros(combine_weights.numel()).index_copy_(0, assignments.positions, products)
    return grad_combine.view(combine_weights.shape)


def _expert_backward(
    plan: Plan, views: _ExpertViews, hidden: Tensor, grad_hidden: Tensor, grad_before: Tensor | None = None
) -> None:
    """Writes one expert's gradients into its views; the buffers are used up.

    The buffers are (rows, H), (rows, H) and, where the activation is gated, (rows, G).
    """
    grad_outputs, rows, pre_activation, weight1, weight2, *grads = views
    grad_x, grad_weight1, grad_bias1, grad_weight2, grad_bias2 = grads
    if grad_bias2 is not None:
        torch.sum(grad_outputs, 0, out=grad_bias2)
    linear_into(grad_outputs, weight2, None, grad_hidden, plan.scale)
    if grad_before is None:
        grad_before = grad_hidden
    plan.activation.backward_into(pre_activation, grad_hidden, hidden, grad_before, grad_weight2 is not None)
    if grad_weight2 is not None:
        linear_into(grad_outputs.t(), hidden, None, grad_weight2, plan.scale)
    if grad_bias1 is not None:
        torch.sum(grad_before, 0, out=grad_bias1)
    if grad_weight1 is not None:
        linear_into(grad_before.t(), rows, None, grad_weight1)
    if grad_x is not None:
        linear_into(grad_before, weight1, None, grad_x)


def _differentiable_backward(
    plan: Plan, operands: Operands, kept: Kept, grad: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The same gradients, with a graph of their own."""
    # Views, since one operand may be computed from another: autograd is to stop at each of them
    views = Operands._make(None if operand is None else operand.view_as(operand) for operand in operands)
    wanted = [view for view, need in zip(views, needed, strict=True) if view is not None and need]
    sums = _by_autograd(plan, views, kept)
    found = iter(torch.autograd.grad(sums, wanted, grad, create_graph=True))
    return tuple(next(found) if need else None for need in needed)


def _by_autograd(plan: Plan, operands: Operands, kept: Kept) -> Tensor:
    """The same sums in steps that autograd knows, for second derivatives."""
    x, combine_weights, weight1, bias1, weight2, bias2 = operands
    sizes = plan.sizes(x.shape[1])
    rows = x.index_select(0, plan.assignments.items).flatten(0, 1).split(sizes)
    outputs = []
    for own_rows, pre_activation, w1, b1, w2, b2 in zip(
        rows,
        _rows_of(kept.pre_activation, sizes),
        weight1,
        _part_of(bias1, sizes),
        weight2,
        _part_of(bias2, sizes),
        strict=True,
    ):
        hidden = plan.activation(F.linear(own_rows, w1, b1))
        if plan.scale != 1:
            hidden = hidden.masked_fill(plan.activation.lost(pre_activation), 0) * plan.scale
        outputs.append(F.linear(hidden, w2, b2))
    outputs.append(x.new_zeros(x.shape[1:]))
    chosen = torch.cat(outputs).view(-1, *x.shape[1:])[plan.assignments.ranks]
    return (chosen * combine_weights[..., None, None]).sum(1).flatten(1)
