"""Token by token, expert by expert: the mixture layer as its equations say it, slow and obvious."""

import math

import torch
from torch import Tensor

from timm_moe_dg.layers.experts import StackedExperts


def naive_mixture(experts: StackedExperts, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
    """y_t = sum_k w_tk E_{i_tk}(x_t), E_i(x) = W2_i GELU(W1_i x + b1_i) + b2_i, for (T, D) tokens, exact GELU."""
    rows = []
    assert experts.fc1.bias is not None
    assert experts.fc2.bias is not None
    for token, indices, weights in zip(x, expert_indices.tolist(), combine_weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(indices, weights, strict=True):
            if expert == experts.num_experts:
                continue
            hidden = experts.fc1.weight[expert] @ token + experts.fc1.bias[expert]
            hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
            row = row + weight.to(token.dtype) * (experts.fc2.weight[expert] @ hidden + experts.fc2.bias[expert])
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros_like(x)


def naive_top_k(scores: list[float], top_k: int) -> list[int]:
    """Indices of the K largest scores, the lowest index first among equals."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_k]


def naive_drops(expert_indices: list[list[int]], priority: list[float], capacity: int) -> list[list[bool]]:
    """Batch prioritized routing: all first choices by priority, then all second choices, until an expert is full."""
    order = sorted(range(len(priority)), key=lambda token: (-priority[token], token))
    taken: dict[int, int] = {}
    dropped = [[False] * len(row) for row in expert_indices]
    for choice in range(len(expert_indices[0])):
        for token in order:
            expert = expert_indices[token][choice]
            taken[expert] = taken.get(expert, 0) + 1
            dropped[token][choice] = taken[expert] > capacity
    return dropped
