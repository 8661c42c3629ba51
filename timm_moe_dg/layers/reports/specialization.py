"""Losses that make MoGE's experts specialize: diversity of the routed experts, invariance of the shared expert.

Axes: B samples, D features, E routed experts, T forced tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ArgumentError
from ..precision import without_autocast
from .routing import RouterOutput


def cka_diversity_loss(outputs: Tensor) -> Tensor:
    """Mean linear CKA over the pairs of experts, on the same tokens (MoGE, equation 2).

    Outputs (E, T, D) give a scalar in 0..1, computed in float32 or better, and 0 for a single expert.
    CKA(H_i, H_j) = |H_i' H_j|^2 / (|H_i' H_i| |H_j' H_j|) of column-centered outputs, with Frobenius norms. If all
    experts are equal, as after upcycling without perturbation, the loss has its maximum 1 and a gradient of zero.
    """
    if outputs.ndim != 3:
        raise ArgumentError.of("outputs", tuple(outputs.shape), "give (experts, tokens, features)")
    with without_autocast(outputs.device.type):
        outputs_ETD = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
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
    if features.ndim != 2 or not targets.shape == domains.shape == features.shape[:1]:
        shapes = [tuple(tensor.shape) for tensor in (features, targets, domains)]
        raise ArgumentError.of("features, targets, domains", shapes, "give (B, D), (B,) and (B,)")
    if temperature <= 0:
        raise ArgumentError.of("temperature", temperature, "give a positive number, such as 0.1")
    same_class = targets.unsqueeze(1) == targets
    same_domain = domains.unsqueeze(1) == domains
    both_known = (domains >= 0).unsqueeze(1) & (domains >= 0)
    positive, negative = both_known & same_class & ~same_domain, both_known & ~same_class & same_domain
    anchors = positive.any(dim=1) & negative.any(dim=1)
    with without_autocast(features.device.type):
        q = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=1)
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
