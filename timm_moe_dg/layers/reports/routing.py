"""Facts about the routing of items, and losses that keep all experts in use.

Axes: T items (tokens, or images in MoGE), E experts, K experts per item.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

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
        dropped: (T, K) bool, assignments that are not computed: over an expert's capacity, or not chosen where the
            number of experts differs between items (K is E there). None for none.
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
    dropped: Tensor | None = None
    routed: Tensor | None = None


def _taken(routing: RouterOutput) -> Tensor:
    """(T, E) int64, 1 where an expert computes an item: without those that were dropped or not routed."""
    taken = torch.ones_like(routing.expert_indices)
    if routing.dropped is not None:
        taken = taken.masked_fill(routing.dropped, 0)
    if routing.routed is not None:
        taken = taken.masked_fill(~routing.routed.unsqueeze(1), 0)
    return taken.new_zeros(routing.logits.shape).scatter_add(1, routing.expert_indices, taken)


def count_assignments(routing: RouterOutput) -> Tensor:
    """(E,) int64: the number of each expert's items, without those that were dropped or not routed."""
    return _taken(routing).sum(0)


def count_first_choices(routing: RouterOutput, num_images: int) -> Tensor:
    """(B, E) int64: the number of each image's items, equally many of each, by their first expert."""
    first_TE = torch.nn.functional.one_hot(routing.expert_indices[:, 0], routing.logits.shape[1])
    if routing.routed is not None:
        first_TE = first_TE * routing.routed.unsqueeze(1)
    return first_TE.view(num_images, -1, first_TE.shape[1]).sum(1)


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


def z_loss(routing: RouterOutput) -> Tensor:
    """Mean over items of logsumexp(logits)^2, which keeps logits small (ST-MoE, arXiv:2202.08906, equation 5).

    Logits are those without noise. Items that are not routed are left out.
    """
    squares_T = routing.logits.logsumexp(dim=-1).square()
    if routing.routed is None:
        return squares_T.mean()
    return (squares_T * routing.routed).sum() / routing.routed.sum().clamp(min=1)


def image_balance_loss(routing: RouterOutput, num_images: int) -> Tensor:
    """Mean over images of sum_e f_e P_e, 1 if balanced within each image (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20).

    Of an image's assignments, the share f_e / E goes to expert e, and P_e is its mean routing probability. Unlike in
    equation 18, f counts the experts that computed, after noise, bias and capacity. The (T, E) items are those of
    `num_images` images in order, equally many of each.
    """
    num_experts = routing.probabilities.shape[1]
    taken_TE = _taken(routing).to(routing.probabilities.dtype)
    routed_TE = torch.ones_like(taken_TE) if routing.routed is None else routing.routed.unsqueeze(1).to(taken_TE)
    counts_BE, items_BE, mass_BE = (
        values.reshape(num_images, -1, num_experts).sum(1)
        for values in (taken_TE, routed_TE.expand_as(taken_TE), routing.probabilities * routed_TE)
    )
    f_BE = num_experts * counts_BE / counts_BE.sum(1, keepdim=True).clamp(min=1)
    return (f_BE * mass_BE / items_BE.clamp(min=1)).sum(1).mean()


def domain_balance_loss(routing: RouterOutput, sizes: Sequence[int]) -> Tensor:
    """Mean of the domains' importance losses (ours): each domain has to use all experts.

    `sizes` are the numbers of images of the domains, which follow each other.
    """
    items = len(routing.probabilities) // max(sum(sizes), 1)
    parts = [size * items for size in sizes]
    routed = [None] * len(parts) if routing.routed is None else routing.routed.split(parts)
    pairs = zip(routing.probabilities.split(parts), routed, strict=True)
    return torch.stack([importance_loss(probabilities, mask) for probabilities, mask in pairs]).mean()


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
