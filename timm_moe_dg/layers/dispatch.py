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


class GroupedAssignments(NamedTuple):
    """All T * K assignments grouped by expert, those that go nowhere as the last expert's last; nothing on the host.

    Attributes:
        order: (T * K,) index of each assignment in the flattened (T, K) table, ordered by expert, then by item.
        experts: (T * K,) the expert of each, in that order.
        ends: (E,) int32, where each expert's assignments end.
        ranks: (T, K) rank of each assignment in that order.
        absent: (T, K) bool, which go nowhere; None if it is known that none does.
    """

    order: Tensor
    experts: Tensor
    ends: Tensor
    ranks: Tensor
    absent: Tensor | None

    def counts(self) -> list[int]:
        """The assignments of each expert. On CUDA this waits for the device."""
        return _counts(self.ends)


def group_assignments(expert_indices: Tensor, num_experts: int) -> GroupedAssignments:
    """Groups a routing table by expert; on CUDA nothing waits for the device.

    Args:
        expert_indices: (T, K) int64; the value `num_experts` marks an assignment that goes nowhere.
        num_experts: E.

    Returns:
        The assignments in expert order.
    """
    order, experts = _by_expert(expert_indices)
    absent = expert_indices == num_experts
    none_is = absent.device.type == "cpu" and not torch.compiler.is_compiling() and not absent.any()
    experts = experts.clamp(max=num_experts - 1)
    ranks = _inverse(order, torch.empty_like(order)).view_as(expert_indices)
    return GroupedAssignments(order, experts, _ends(experts, num_experts), ranks, None if none_is else absent)


def sort_assignments(expert_indices: Tensor, num_experts: int) -> SortedAssignments:
    """Groups a routing table by expert, without what goes nowhere.

    Args:
        expert_indices: (T, K) int64; the value `num_experts` marks an assignment that goes nowhere.
        num_experts: E.

    Returns:
        The assignments in expert order. On CUDA this waits for the device once, since the counts come to the host.
    """
    order, experts = _by_expert(expert_indices)
    counts = _counts(_ends(experts, num_experts))
    positions = order[: sum(counts)]
    items = torch.div(positions, max(expert_indices.shape[1], 1), rounding_mode="floor")
    ranks = _inverse(positions, torch.full_like(order, len(positions)))
    return SortedAssignments(positions, items, counts, ranks.view_as(expert_indices))


def _by_expert(expert_indices: Tensor) -> tuple[Tensor, Tensor]:
    """(T, K) -> the order of its entries by expert, then by item, and the experts in that order."""
    flat = expert_indices.flatten()
    order = torch.argsort(flat, stable=True)
    return order, flat.index_select(0, order)


def _ends(experts: Tensor, num_experts: int) -> Tensor:
    """Ascending experts -> (E,) int32, where each one's end."""
    each = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, each, right=True, out_int32=True)


def _counts(ends: Tensor) -> list[int]:
    on_host = ends.tolist()
    return [end - start for start, end in zip([0, *on_host], on_host, strict=False)]


def _inverse(order: Tensor, ranks: Tensor) -> Tensor:
    """Writes each entry's place in an order to the entry's own."""
    return ranks.scatter_(0, order, torch.arange(len(order), dtype=ranks.dtype, device=ranks.device))


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
