"""Facts about the routing of items, and losses that keep all experts in use.

Axes: T items (tokens, or images in MoGE), E experts, K experts per item.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Optional

import torch
from torch import Tensor


class RouterOutput(NamedTuple):
    """The routing of T items.

    Attributes:
        logits: (T, E) before noise, as they enter the softmax.
        noisy_logits: (T, E) with noise, from which experts are chosen; equal to `logits` without noise.
        probabilities: (T, E) routing mass without noise, which the importance loss balances.
        expert_indices: (T, K) int64, best expert first.
        combine_weights: (T, K) weights of the experts' outputs; zero where `dropped`.
        noise_std: Standard deviation of the noise, 0.0 for none.
        dropped: (T, K) bool, assignments over an expert's capacity; None without a capacity.
        routed: (T,) bool, False for items without routing (padding, MoGE samples without metadata); None for none.

    >>> timm_moe_dg.layers.LinearRouter(8, num_experts=4, top_k=2)(torch.randn(5, 8)).expert_indices.shape
    torch.Size([5, 2])
    """

    logits: Tensor
    noisy_logits: Tensor
    probabilities: Tensor
    expert_indices: Tensor
    combine_weights: Tensor
    noise_std: float
    dropped: Optional[Tensor] = None  # noqa: UP045 (TorchScript reads this annotation)
    routed: Optional[Tensor] = None  # noqa: UP045


def count_assignments(routing: RouterOutput) -> Tensor:
    """(E,) int64: the number of each expert's items, without those that were dropped or not routed."""
    taken = torch.ones_like(routing.expert_indices)
    if routing.dropped is not None:
        taken = taken.masked_fill(routing.dropped, 0)
    if routing.routed is not None:
        taken = taken.masked_fill(~routing.routed.unsqueeze(1), 0)
    counts = taken.new_zeros(routing.logits.shape[1])
    return counts.scatter_add(0, routing.expert_indices.flatten(), taken.flatten())


def squared_cv(values: Tensor, unbiased: bool = False) -> Tensor:
    """(E,) non-negative -> (std / mean)^2 with the population standard deviation, unless `unbiased`; 0 for zeros."""
    if len(values) == 1:
        return values.sum() * 0.0
    return values.var(correction=int(unbiased)) / values.mean().square().clamp(min=torch.finfo(values.dtype).tiny)


def importance_loss(probabilities: Tensor, routed: Tensor | None = None, unbiased: bool = False) -> Tensor:
    """Squared coefficient of variation of the experts' total routing probability (Shazeer et al., 2017; GMoE, eq. 8).

    Args:
        probabilities: (T, E) routing probabilities without noise.
        routed: (T,) bool, items to include; None for all.
        unbiased: Divide the variance by E - 1 instead of E.
    """
    if routed is not None:
        probabilities = probabilities * routed.unsqueeze(1)
    return squared_cv(probabilities.sum(0), unbiased)


def load_loss(
    logits: Tensor,
    noisy_logits: Tensor,
    top_k: int,
    noise_std: float,
    routed: Tensor | None = None,
    unbiased: bool = False,
) -> Tensor:
    """Squared coefficient of variation of the experts' expected number of items (GMoE, eq. 10; V-MoE, appendix A).

    This is V-MoE's form. GMoE's equation takes the threshold after the softmax and compares it with raw logits.

    Experts were chosen from the `noisy_logits` (T, E), which are the `logits` (T, E) with noise of a positive standard
    deviation. Other arguments are those of `importance_loss`.
    """
    # p_te = 1 - Phi((eta_t - logits_te) / noise_std): the probability that expert e is among the K best of item t if
    # its noise alone is drawn again, where eta_t is the K-th largest noisy logit of the item
    threshold_T1 = noisy_logits.topk(top_k, dim=-1).values[:, -1:]
    chances_TE = 0.5 * torch.erfc((threshold_T1 - logits) / (noise_std * math.sqrt(2.0)))
    if routed is not None:
        chances_TE = chances_TE * routed.unsqueeze(1)
    return squared_cv(chances_TE.sum(0), unbiased)


def vmoe_loss(routing: RouterOutput) -> Tensor:
    """(importance + load) / 2 of one layer, or importance alone without noise (V-MoE; GMoE, section 4.3)."""
    return _balancing_loss(routing, routing.logits)


def tutel_loss(routing: RouterOutput) -> Tensor:
    """As `vmoe_loss`, in the form of the library behind GMoE's released code.

    Tutel compares the noisy logits with the *probabilities* without noise, and uses the unbiased variance.
    """
    return _balancing_loss(routing, routing.probabilities, unbiased=True)


def _balancing_loss(routing: RouterOutput, clean: Tensor, unbiased: bool = False) -> Tensor:
    importance = importance_loss(routing.probabilities, routing.routed, unbiased)
    if routing.noise_std == 0:
        return importance
    top_k = routing.expert_indices.shape[1]
    load = load_loss(clean, routing.noisy_logits, top_k, routing.noise_std, routing.routed, unbiased)
    return (importance + load) / 2


BALANCING_LOSSES: Mapping[str, Callable[[RouterOutput], Tensor]] = MappingProxyType(
    {"vmoe": vmoe_loss, "tutel": tutel_loss}
)
