"""Losses that divide the work of MoGE's experts: the routed ones unlike each other, the shared one alike everywhere.

Axes: B samples, D features, E routed experts, T forced tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ArgumentError
from ..layers.precision import without_autocast


def cka_diversity_loss(outputs: Tensor) -> Tensor:
    """Mean linear CKA over the pairs of experts, on the same tokens (MoGE, equation 2).

    CKA(H_i, H_j) = |H_i' H_j|^2 / (|H_i' H_i| |H_j' H_j|) of column-centered outputs, Frobenius norms. It is computed
    from the T x T inner products of the tokens, in float32 or better: |H_i' H_j|^2 = <H_i H_i', H_j H_j'>.

    Where all experts are equal, as upcycling leaves them, the loss is at its maximum 1 and its gradient is zero.

    Args:
        outputs: (E, T, D) outputs of each expert for the same tokens.

    Returns:
        Scalar in 0..1; 0 for a single expert.

    Raises:
        ArgumentError: `outputs` does not have three axes.
    """
    if outputs.ndim != 3:
        raise ArgumentError.of("outputs", tuple(outputs.shape), "give (experts, tokens, features)")
    with without_autocast(outputs.device.type):
        outputs_ETD = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        centered_ETD = outputs_ETD - outputs_ETD.mean(dim=1, keepdim=True)
        grams_EP = (centered_ETD @ centered_ETD.transpose(1, 2)).flatten(1)
        similarity_EE = F.normalize(grams_EP, dim=1) @ F.normalize(grams_EP, dim=1).T
    first, second = torch.triu_indices(len(outputs), len(outputs), offset=1, device=outputs.device)
    return similarity_EE[first, second].sum() / max(1, len(first))


def supcon_invariance_loss(features: Tensor, targets: Tensor, domains: Tensor, temperature: float = 0.1) -> Tensor:
    """Supervised contrast of the shared expert across discovered domains (MoGE, equation 3).

    Positives P_i of an anchor share its class in another domain, negatives N_i its domain in another class. Over all
    anchors that have both: -mean_i [LSE_{p in P_i}(q_i . p / t) - LSE_{v in P_i or N_i}(q_i . v / t)], q normalized.

    Args:
        features: (B, D) the shared expert's feature of each sample.
        targets: (B,) class indices.
        domains: (B,) discovered domains; a negative one is unknown, and leaves the sample out.
        temperature: t, positive.

    Returns:
        Scalar, not negative; 0, connected to `features`, where no sample has both a positive and a negative.

    Raises:
        ArgumentError: The shapes do not match, or the temperature is not positive.
    """
    if features.ndim != 2 or not targets.shape == domains.shape == features.shape[:1]:
        shapes = [tuple(tensor.shape) for tensor in (features, targets, domains)]
        raise ArgumentError.of("features, targets, domains", shapes, "give (B, D), (B,) and (B,)")
    if temperature <= 0:
        raise ArgumentError.of("temperature", temperature, "give a positive number, such as 0.1")
    same_class = targets.unsqueeze(1) == targets
    same_domain = domains.unsqueeze(1) == domains
    known = (domains >= 0).unsqueeze(1) & (domains >= 0)
    positive, negative = known & same_class & ~same_domain, known & ~same_class & same_domain
    anchors = positive.any(dim=1) & negative.any(dim=1)
    if not anchors.any():
        return features.sum() * 0.0
    with without_autocast(features.device.type):
        q = F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=1)
        logits = q[anchors] @ q.T / temperature
    attracted = logits.masked_fill(~positive[anchors], -torch.inf).logsumexp(dim=1)
    compared = logits.masked_fill(~(positive | negative)[anchors], -torch.inf).logsumexp(dim=1)
    return (compared - attracted).mean()
