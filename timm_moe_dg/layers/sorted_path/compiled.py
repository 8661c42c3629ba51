"""The sorted experts as two operators that torch.compile calls as they are: no program can be traced from counts.

Only compiled programs hold them; exported ones need no package and hold the portable loop.

Axes: as in experts.py; all T * K assignments have a place, those that go nowhere the last ones.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from ..dispatch import sort_assignments
from ..precision import without_autocast
from .activations import SortedActivation
from .dropout import HiddenDropout, draw_seed
from .experts import (
    Kept,
    Operands,
    Plan,
    backward_of,
    forward_alone,
    forward_into,
    gradients_follow,
    known_weights,
    room_for,
)

# What a CUDA graph cannot hold: the counts come to the host
_TAGS = (torch.Tag.cudagraph_unsafe,)


def compiled_experts(operands: Operands, expert_indices: Tensor, activation: SortedActivation, drop: float) -> Tensor:
    """As `sorted_experts`, within torch.compile, and differentiable once.

    Args:
        operands: Items, weights of the outputs, and the experts' parameters.
        expert_indices: (T, K); the value E marks an assignment that goes nowhere.
        activation: Of the hidden features.
        drop: Dropout rate of the hidden features; 0 outside of training.

    Returns:
        (T, N, D); zeros for an item that went nowhere.
    """
    seed = _draw_seed(torch.device("cpu")) if drop > 0 else None
    sums, _, _ = _sorted_experts(*operands, expert_indices, seed, drop, *activation, gradients_follow(operands))
    return sums.view(operands.x.shape)


def _plan_of(
    operands: Operands, expert_indices: Tensor, seed: Tensor | None, drop: float, activation: SortedActivation
) -> tuple[Plan, Operands]:
    assignments = sort_assignments(expert_indices, len(operands.weight1))
    plan = Plan(assignments, activation, None if seed is None else HiddenDropout(drop, int(seed)))
    return plan, operands._replace(combine_weights=known_weights(assignments, operands.combine_weights))


# With the tag no two of them become one, and a checkpointed block draws the same again: by the generator's state, which
# torch keeps for the device among the arguments
@torch.library.custom_op("timm_moe_dg::draw_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(device: torch.device) -> Tensor:
    return draw_seed()


@_draw_seed.register_fake
def _(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


# Optional, not |: the operators' schemas are read from the annotations
@torch.library.custom_op("timm_moe_dg::sorted_experts", mutates_args=(), tags=_TAGS)
def _sorted_experts(
    x: Tensor,
    combine_weights: Tensor,
    weight1: Tensor,
    bias1: Optional[Tensor],  # noqa: UP045
    weight2: Tensor,
    bias2: Optional[Tensor],  # noqa: UP045
    expert_indices: Tensor,
    seed: Optional[Tensor],  # noqa: UP045
    drop: float,
    function: str,
    approximate: str,
    gate: Optional[int],  # noqa: UP045
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums (T, N * D); if kept, features before the activation (T * K * N, G) and outputs (T * K + 1, N, D)."""
    with without_autocast(x.device.type):
        operands = Operands(x, combine_weights, weight1, bias1, weight2, bias2)
        activation = SortedActivation(function, approximate, gate)
        plan, operands = _plan_of(operands, expert_indices, seed, drop, activation)
        if not keep:
            return forward_alone(plan, operands), x.new_empty(0), x.new_empty(0)
        room = room_for(x, weight1, expert_indices.numel())
        return forward_into(plan, operands, Kept.of(plan.assignments, x, *room)), *room


@_sorted_experts.register_fake
def _(x: Tensor, combine_weights: Tensor, weight1: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    room = room_for(x, weight1, rest[3].numel()) if rest[-1] else (x.new_empty(0), x.new_empty(0))
    return x.new_empty(x.shape[0], x.shape[1] * x.shape[2]), *room


@torch.library.custom_op("timm_moe_dg::sorted_experts_backward", mutates_args=(), tags=_TAGS)
def _sorted_experts_backward(
    grad: Tensor,
    x: Tensor,
    combine_weights: Tensor,
    weight1: Tensor,
    bias1: Optional[Tensor],  # noqa: UP045
    weight2: Tensor,
    bias2: Optional[Tensor],  # noqa: UP045
    expert_indices: Tensor,
    seed: Optional[Tensor],  # noqa: UP045
    pre_activation: Tensor,
    outputs: Tensor,
    drop: float,
    function: str,
    approximate: str,
    gate: Optional[int],  # noqa: UP045
    needed: list[bool],
) -> list[Tensor]:
    """Gradients in the operands' order; without elements where none is needed."""
    with without_autocast(x.device.type):
        operands = Operands(x, combine_weights, weight1, bias1, weight2, bias2)
        activation = SortedActivation(function, approximate, gate)
        plan, known = _plan_of(operands, expert_indices, seed, drop, activation)
        kept = Kept.of(plan.assignments, x, pre_activation, outputs)
        found = backward_of(plan, known, kept, grad, tuple(needed))
    return [
        grad.new_empty(0) if one is None or not need else one.contiguous()
        for one, need in zip(found, needed, strict=True)
    ]


@_sorted_experts_backward.register_fake
def _(grad: Tensor, *rest: Any) -> list[Tensor]:
    operands, needed = rest[:6], rest[-1]
    return [
        torch.empty_like(one, memory_format=torch.contiguous_format) if need else grad.new_empty(0)
        for one, need in zip(operands, needed, strict=True)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, drop, function, approximate, gate, _ = inputs
    ctx.plan = (drop, function, approximate, gate)
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:6])
    found = _sorted_experts_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.plan, needed)
    return *(one if need else None for one, need in zip(found, needed, strict=True)), *[None] * 7


_sorted_experts.register_autograd(_gradients, setup_context=_save)
