"""Stacked experts in float64, item by item and in the words of their equation, with a bound of what rounding may do.

Of everything that `StackedExperts` can be: activations, gates, missing biases, normalized hidden features, items of
several tokens.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from timm_moe_dg.layers.experts import StackedExperts


def _phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _tanh_phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: x * _phi(x),
    "gelu_tanh": lambda x: x * _tanh_phi(x),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x * (x > 0),
}
Gate = str | None  # "first" or "last": the half of the features that passes through the activation


def weighted_experts(
    experts: StackedExperts, act: str, gate: Gate, x: Tensor, expert_indices: Tensor, combine_weights: Tensor
) -> Tensor:
    """Sum over k of w_tk (W2 norm(h) + b2), h = act(W1 x_t + b1) or its gated form, in float64.

    Args:
        experts: Whose parameters, and normalization, are taken.
        act: Name in `ACTIVATIONS`.
        gate: Which half is passed through it; None for no gate.
        x: (T, ..., D).
        expert_indices: (T, K); the number of experts stands for none.
        combine_weights: (T, K).

    Returns:
        (T, ..., D).
    """
    rows = []
    for item, indices, weights in zip(x.double(), expert_indices.tolist(), combine_weights.double(), strict=True):
        row = torch.zeros_like(item)
        for expert, weight in zip(indices, weights, strict=True):
            if expert != experts.num_experts:
                row = row + weight * _expert(experts, expert, act, gate, item)
        rows.append(row)
    return torch.stack(rows) if rows else x.double()


def _expert(experts: StackedExperts, expert: int, act: str, gate: Gate, item: Tensor) -> Tensor:
    before = _linear(experts.fc1.weight[expert], experts.fc1.bias, expert, item)
    if gate is None:
        hidden = ACTIVATIONS[act](before)
    else:
        first, last = before[..., : before.shape[-1] // 2], before[..., before.shape[-1] // 2 :]
        hidden = ACTIVATIONS[act](first) * last if gate == "first" else first * ACTIVATIONS[act](last)
    if isinstance(experts.norm, torch.nn.LayerNorm):
        centered = hidden - hidden.mean(-1, keepdim=True)
        hidden = centered / (centered.square().mean(-1, keepdim=True) + experts.norm.eps).sqrt()
        hidden = hidden * experts.norm.weight.double() + experts.norm.bias.double()
    return _linear(experts.fc2.weight[expert], experts.fc2.bias, expert, hidden)


def _linear(weight: Tensor, bias: Tensor | None, expert: int, x: Tensor) -> Tensor:
    product = (x.unsqueeze(-2) * weight.double()).sum(-1)
    return product if bias is None else product + bias[expert].double()


@torch.no_grad()
def magnitude(experts: StackedExperts, gate: Gate, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> float:
    """The largest sum of absolute values in an output: rounding changes that by so many rounding units of it.

    Every number is taken as its absolute value and the activation as a line of slope 1, which bounds all of them.
    """
    largest = 0.0
    for item, indices, weights in zip(x.double().abs(), expert_indices.tolist(), combine_weights, strict=True):
        total = torch.zeros_like(item)
        for expert, weight in zip(indices, weights.double().abs(), strict=True):
            if expert != experts.num_experts:
                before = _linear(experts.fc1.weight[expert].abs(), _absolute(experts.fc1.bias), expert, item)
                half = before.shape[-1] // 2
                hidden = before if gate is None else before[..., :half] * before[..., half:]
                total += weight * _linear(experts.fc2.weight[expert].abs(), _absolute(experts.fc2.bias), expert, hidden)
        largest = max(largest, float(total.max()) if total.numel() else 0.0)
    return largest


def _absolute(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.abs()
