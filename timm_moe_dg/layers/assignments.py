"""The order of assignments by expert, and the assignments dropped over an expert's capacity.

Axes: T items (tokens, or whole images in routing by image), E experts, K experts per item (top_k), R rows of items in
the order of the experts. The expert index E marks an assignment that goes nowhere.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compat import values_readable


class Assignments(NamedTuple):
    """Assignments in the order of the experts.

    Those that go nowhere are at the end. Where values can be read, one row stands for all of them.
    """

    order: Tensor  # (R,) position of each row in the flattened (T, K) table, by expert, then by item
    ranks: Tensor  # (T, K) row of each assignment
    counts: Tensor  # (E,) int64 number of each expert's rows

    @classmethod
    def of(cls, expert_indices: Tensor, num_experts: int, *, counts_on_cpu: bool) -> "Assignments":
        """Orders a (T, K) routing table. On CUDA this waits for the device if the counts are needed on the CPU."""
        flat = expert_indices.flatten()
        # Stable: an expert's items keep their order, so results are repeatable
        order = torch.argsort(flat, stable=True)
        ranks = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        experts = torch.arange(num_experts + 1, dtype=flat.dtype, device=flat.device)
        counts = torch.searchsorted(flat[order], experts).diff()
        if counts_on_cpu and not counts.is_meta:
            counts = counts.cpu()
            if values_readable(counts):
                number = int(counts.sum())
                order, ranks = order[: number + 1], ranks.clamp(max=number)
        return cls(order, ranks.view_as(expert_indices), counts)

    def gather(self, x: Tensor) -> Tensor:
        """(T, ...) items -> (R, ...) rows."""
        top_k = max(self.ranks.shape[1], 1)
        rows: Tensor = _Select.apply(x, torch.div(self.order, top_k, rounding_mode="floor"), self.ranks)
        return rows

    def combine(self, outputs: Tensor, combine_weights: Tensor) -> Tensor:
        """(R, N, D) outputs of the rows -> (T, N, D) sums over the rows of each item, weighted by (T, K)."""
        chosen = _Select.apply(outputs, self.ranks.flatten(), self.order).unflatten(0, self.ranks.shape)
        return (chosen * combine_weights[..., None, None]).sum(1)


class _Select(torch.autograd.Function):
    # The gradient of index_select is index_add_, which is serial on a CPU and has no fixed order on CUDA. This gradient
    # is a selection as well. That of a row which stands for several assignments is incomplete, and is not used.
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, places: Tensor) -> Tensor:
        """Selects x[index]; entry i of x is in the places (len(x),) or (len(x), K) of the result."""
        ctx.save_for_backward(places)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        selected = grad.index_select(0, places.flatten())
        return selected if places.dim() == 1 else selected.view(*places.shape, *grad.shape[1:]).sum(1), None, None


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
