"""The order of assignments by expert, and the assignments dropped over an expert's capacity.

Axes: T items (tokens, or whole images in routing by image), E experts, K experts per item (top_k), C slots per expert,
A assignments (A = T * K minus those that go nowhere). The expert index E marks an assignment that goes nowhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class SortedAssignments(NamedTuple):
    """Assignments in expert order, without those that go nowhere."""

    positions: Tensor  # (A,) position in the flattened (T, K) table, ordered by expert, then by item
    items: Tensor  # (A,) item of each assignment
    counts: list[int]  # E numbers of assignments, with sum A
    ranks: Tensor  # (T, K) rank of each assignment in that order, or A for an assignment that goes nowhere
    order: Tensor  # (T * K,) the positions, then those of assignments that go nowhere

    @classmethod
    def of(cls, order: Tensor, counts: list[int], ranks: Tensor) -> "SortedAssignments":
        """Completes an order, without waiting for a device."""
        positions = order[: sum(counts)]
        items = torch.div(positions, max(ranks.shape[1], 1), rounding_mode="floor")
        return cls(positions, items, counts, ranks, order)


class GroupedAssignments(NamedTuple):
    """All T * K assignments in expert order, those that go nowhere at the end of the last expert's."""

    order: Tensor  # (T * K,) position in the flattened (T, K) table, ordered by expert, then by item
    experts: Tensor  # (T * K,) expert of each assignment in that order
    ends: Tensor  # (E,) int32, end of each expert's assignments
    ranks: Tensor  # (T, K) rank of each assignment in that order
    absent: Tensor | None  # (T, K) bool, True where an assignment goes nowhere, or None if surely none does

    def counts(self) -> list[int]:
        """Returns the number of each expert's assignments. On CUDA this waits for the device."""
        return _counts(self.ends)


def group_assignments(expert_indices: Tensor, num_experts: int) -> GroupedAssignments:
    """Orders a (T, K) int64 routing table by expert, without waiting for a CUDA device."""
    order, experts = _by_expert(expert_indices)
    absent = expert_indices == num_experts
    # Reading `any` is free in eager mode on a CPU; elsewhere it would wait for the device or break the graph
    none_absent = absent.device.type == "cpu" and not torch.compiler.is_compiling() and not absent.any()
    experts = experts.clamp(max=num_experts - 1)
    ranks = _inverse(order, torch.empty_like(order)).view_as(expert_indices)
    return GroupedAssignments(order, experts, _ends(experts, num_experts), ranks, None if none_absent else absent)


def sort_assignments(expert_indices: Tensor, num_experts: int) -> SortedAssignments:
    """Orders a (T, K) int64 routing table by expert, without assignments that go nowhere. On CUDA this waits once."""
    order, experts = _by_expert(expert_indices)
    counts = _counts(_ends(experts, num_experts))
    ranks = _inverse(order[: sum(counts)], torch.full_like(order, sum(counts)))
    return SortedAssignments.of(order, counts, ranks.view_as(expert_indices))


def _by_expert(expert_indices: Tensor) -> tuple[Tensor, Tensor]:
    """(T, K) -> the order of its entries by expert, then by item, and the experts in that order."""
    flat = expert_indices.flatten()
    order = torch.argsort(flat, stable=True)  # stable: an expert's items keep their order, so results are repeatable
    return order, flat.index_select(0, order)


def _ends(experts: Tensor, num_experts: int) -> Tensor:
    """Ascending experts -> (E,) int32, end of each expert's entries."""
    indices = torch.arange(num_experts, dtype=experts.dtype, device=experts.device)
    return torch.searchsorted(experts, indices, right=True, out_int32=True)


def _counts(ends: Tensor) -> list[int]:
    on_host = ends.tolist()
    return [end - start for start, end in zip([0, *on_host], on_host, strict=False)]


def _inverse(order: Tensor, ranks: Tensor) -> Tensor:
    """Writes the rank of each entry of `order` to the entry's position in `ranks`."""
    return ranks.scatter_(0, order, torch.arange(len(order), dtype=ranks.dtype, device=ranks.device))


def expert_capacity(num_items: int, num_experts: int, top_k: int, capacity_factor: float) -> int:
    """Slots per expert: K * floor(capacity_factor * ceil(T / E)), as in the GMoE paper's released code."""
    return top_k * int(capacity_factor * -(-num_items // num_experts))


def over_capacity(expert_indices: Tensor, priority: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Batch prioritized routing: (T, K) experts, best first -> (T, K) bool, True for assignments over capacity.

    First choices of all items are placed before second choices. Within a choice, items with a larger `priority` come
    first, and in a tie the earlier item (V-MoE, section 3.4 of Riquelme et al., 2021). The priority (T,) is an item's
    largest routing probability. Assignments to the index E are never dropped.
    """
    order_T = torch.argsort(priority, descending=True, stable=True)
    choices_KT = expert_indices.index_select(0, order_T).t()
    one_hot = torch.nn.functional.one_hot(choices_KT.flatten(), num_experts + 1)
    slot = one_hot.cumsum(0).gather(1, choices_KT.reshape(-1, 1)).view_as(choices_KT) - 1
    dropped = torch.empty_like(expert_indices, dtype=torch.bool)
    dropped[order_T] = ((slot >= capacity) & (choices_KT < num_experts)).t()
    return dropped
