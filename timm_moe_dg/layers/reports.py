"""What layers report of a training forward: routing, and losses that keep experts in use or make them specialize.

A module with losses of its own has a method `training_losses(targets, weights)`, which returns those of the last
training forward by name. `losses.reported_losses` calls it on every module of a model.

Axes: T items (tokens, or images in MoGE), E experts, K experts per item, B images, D features.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError
from .parameters import upcast, without_autocast


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


def cka_diversity_loss(outputs: Tensor) -> Tensor:
    """Mean linear CKA over the pairs of experts, on the same tokens (MoGE, equation 2).

    Outputs (E, T, D) give a scalar in 0..1, computed in float32 or better, and 0 for a single expert.
    CKA(H_i, H_j) = |H_i' H_j|^2 / (|H_i' H_i| |H_j' H_j|) of column-centered outputs, with Frobenius norms. If all
    experts are equal, as after upcycling without perturbation, the loss has its maximum 1 and a gradient of zero.
    """
    with without_autocast(outputs.device.type):
        outputs_ETD = upcast(outputs)
        centered_ETD = outputs_ETD - outputs_ETD.mean(dim=1, keepdim=True)
        # |H_i' H_j|^2 = <H_i H_i', H_j H_j'>: cosines of the flattened T x T inner products, P = T * T
        grams_EP = (centered_ETD @ centered_ETD.transpose(1, 2)).flatten(1)
        similarity_EE = F.normalize(grams_EP, dim=1) @ F.normalize(grams_EP, dim=1).T
    first, second = torch.triu_indices(len(outputs), len(outputs), offset=1, device=outputs.device)
    return similarity_EE[first, second].sum() / max(1, len(first))


def supcon_invariance_loss(features: Tensor, targets: Tensor, domains: Tensor, temperature: float = 0.1) -> Tensor:
    """Supervised contrastive loss of the shared expert across discovered domains (MoGE, equation 3).

    An anchor's positives P_i are samples of its class in other domains. Its negatives N_i are samples of its domain in
    other classes. Over the anchors with both, and with normalized features q, the loss is
    -mean_i [LSE_{p in P_i}(q_i . p / t) - LSE_{v in P_i or N_i}(q_i . v / t)]. It is at least 0, and 0 with
    a gradient of zero if there is no such anchor.

    Args:
        features: (B, D) the shared expert's feature of each sample.
        targets: (B,) class indices.
        domains: (B,) discovered domains; samples with a negative one, unknown, are left out.
        temperature: t, positive.
    """
    if temperature <= 0:
        raise ArgumentError.of("temperature", temperature, "give a positive number, such as 0.1")
    same_class = targets.unsqueeze(1) == targets
    same_domain = domains.unsqueeze(1) == domains
    both_known = (domains >= 0).unsqueeze(1) & (domains >= 0)
    positive, negative = both_known & same_class & ~same_domain, both_known & ~same_class & same_domain
    anchors = positive.any(dim=1) & negative.any(dim=1)
    with without_autocast(features.device.type):
        q = F.normalize(upcast(features), dim=1)
        logits = q @ q.T / temperature
    # Rows of other samples are computed over all samples and left out. To select the anchors would wait for a device
    unused = ~anchors.unsqueeze(1)
    attracted = logits.masked_fill(~(positive | unused), -torch.inf).logsumexp(dim=1)
    compared = logits.masked_fill(~(positive | negative | unused), -torch.inf).logsumexp(dim=1)
    return (compared - attracted).masked_fill(~anchors, 0.0).sum() / anchors.sum().clamp(min=1)


def discovered_domains(routing: RouterOutput) -> Tensor:
    """Recorded routing of a MoGE layer -> (B,) int64, best expert without noise; -1 for samples without metadata."""
    domains = routing.probabilities.detach().argmax(dim=-1)
    return domains if routing.routed is None else domains.masked_fill(~routing.routed, -1)


def _weight(default: float, loss: str, words: str) -> Any:
    return field(default=default, metadata={"loss": loss, "words": words})


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the mixtures' losses, and the temperature of one. Options of a run have the same names.

    Losses with the weight 0 are not computed, apart from the auxiliary loss. The names of the losses and their
    descriptions are in the metadata of the fields. `decades` there is half the width of a random search around a
    default, which leaves out weights of 0.
    """

    aux_coef: float = _weight(0.01, "aux_loss", "the routers' auxiliary loss")
    z_coef: float = _weight(0.0, "z_loss", "the routers' z-loss")
    image_coef: float = _weight(0.0, "image_loss", "the balance of experts within images")
    domain_coef: float = _weight(0.0, "domain_loss", "the balance of experts within domains")
    cka_coef: float = _weight(0.01, "cka_loss", "MoGE's diversity loss (CKA)")  # exists while tokens are forced
    supcon_coef: float = _weight(0.1, "supcon_loss", "MoGE's invariance loss (SupCon)")
    supcon_temperature: float = field(default=0.1, metadata={"decades": 0.5})

    @classmethod
    def of(cls, options: object) -> Self:
        """Takes the weights from the attributes of the same names."""
        return cls(**{item.name: getattr(options, item.name) for item in fields(cls)})


class ReportedLoss(NamedTuple):
    """A loss of one module."""

    value: Tensor  # scalar, not weighted
    weight: float = 1.0
    over_modules: str = "sum"  # the value for a model, of those of its modules: their "sum", "mean" or "last"
