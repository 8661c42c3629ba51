"""The choice of experts by scores: by items, and by experts.

Axes: T items, E experts, K experts per item (top_k).
"""

import torch
from torch import Tensor


def top_k_indices(scores: Tensor, top_k: int) -> Tensor:
    """(T, E) scores -> (T, K) int64 indices of the K largest, best first; the lowest index wins a tie."""
    # Not torch.topk, which leaves the order of ties open. argmax is exported by every exporter.
    picked = [scores.argmax(dim=-1, keepdim=True)]
    for _ in range(top_k - 1):
        scores = scores.scatter(-1, picked[-1], -float("inf"))
        picked.append(scores.argmax(dim=-1, keepdim=True))
    return torch.cat(picked, dim=-1)


def experts_choice(scores: Tensor, top_k: int, valid: Tensor | None = None) -> Tensor:
    """(T, E) scores -> (T, E) bool: each expert takes the max(1, floor(K T / E)) items with its largest scores.

    The lowest index wins a tie. `valid` (T,) is False for items that are left out.
    """
    num_items, num_experts = scores.shape
    if valid is None:
        valid = torch.ones_like(scores[:, 0], dtype=torch.bool)
    order_TE = scores.masked_fill(~valid.unsqueeze(1), -1.0).argsort(dim=0, descending=True, stable=True)
    places_TE = torch.arange(num_items, device=scores.device).unsqueeze(1).expand_as(order_TE)
    ranks_TE = torch.empty_like(order_TE).scatter(0, order_TE, places_TE)
    taken = (valid.sum() * top_k // num_experts).clamp(min=1)  # a tensor, since to read it would wait for a device
    return (ranks_TE < taken) & valid.unsqueeze(1)
