"""Which item goes to which expert, and in which order.

Axes: T items (tokens, or whole images where routing is per image), E experts, K experts per item (top_k),
A assignments (A = T * K less the dropped ones), C slots per expert. An item is anything indexed by the first axis.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SortedAssignments(NamedTuple):
    """Assignments grouped by expert.

    Attributes:
        positions: (A,) index of each assignment in the flattened (T, K) table, ordered by expert, then by item.
        items: (A,) the item that each assignment reads and writes.
        counts: E integers that sum to A, the assignments of each expert.
        ranks: (T, K) rank of each assignment in that order; A for one that goes nowhere.
    """

    positions: Tensor
    items: Tensor
    counts: list[int]
    ranks: Tensor


def sort_assignments(expert_indices: Tensor, num_experts: int) -> SortedAssignments:
    """Groups a routing table by expert.

    Args:
        expert_indices: (T, K) int64; the value `num_experts` marks an assignment that goes nowhere.
        num_experts: E.

    Returns:
        The assignments in expert order. On CUDA this waits for the device, since the counts come to the host.
    """
    flat_A = expert_indices.flatten()
    counts = torch.bincount(flat_A, minlength=num_experts + 1).tolist()[:num_experts]
    positions = torch.argsort(flat_A, stable=True)[: sum(counts)]
    items = torch.div(positions, max(expert_indices.shape[1], 1), rounding_mode="floor")
    ranks = torch.full_like(flat_A, len(positions))
    ranks.scatter_(0, positions, torch.arange(len(positions), dtype=ranks.dtype, device=ranks.device))
    return SortedAssignments(positions, items, counts, ranks.view_as(expert_indices))


def expert_capacity(num_items: int, num_experts: int, top_k: int, capacity_factor: float) -> int:
    """Slots per expert: K * floor(capacity_factor * ceil(T / E)), as the GMoE paper's released code counts them."""
    return top_k * int(capacity_factor * -(-num_items // num_experts))


def over_capacity(expert_indices: Tensor, priority: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Batch prioritized routing: which assignments find their expert full.

    First choices of all items are placed before second choices; within a choice, items with a larger `priority` come
    first, and the earlier item wins a tie (V-MoE, section 3.4 of Riquelme et al., 2021).

    Args:
        expert_indices: (T, K) int64, the k-th choice of each item in column k.
        priority: (T,) the largest routing probability of each item.
        num_experts: E.
        capacity: C, slots per expert.

    Returns:
        (T, K) bool, True where the assignment is dropped.
    """
    order_T = torch.argsort(priority, descending=True, stable=True)
    choices_KT = expert_indices.index_select(0, order_T).t()
    one_hot = torch.nn.functional.one_hot(choices_KT.flatten(), num_experts)
    slot = one_hot.cumsum(0).gather(1, choices_KT.reshape(-1, 1)).view_as(choices_KT) - 1
    dropped = torch.empty_like(expert_indices, dtype=torch.bool)
    dropped[order_T] = (slot >= capacity).t()
    return dropped
