"""MoGE's losses: diversity of the routed experts, invariance of the shared expert, and both for a whole model.

Axes: B samples, D features, E routed experts, T forced tokens.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp, RouterOutput
from ..layers.precision import without_autocast


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


def _layers(model: nn.Module) -> list[GeoMoeMlp]:
    # By attribute, since scripted layers have another class
    return [cast(GeoMoeMlp, module) for module in model.modules() if hasattr(module, "forced_tokens")]


def force_tokens(model: nn.Module, num_tokens: int) -> None:
    """Makes every MoGE layer send random tokens through all its experts in training, for the diversity loss.

    Each layer chooses `num_tokens` tokens anew in each forward, or none with 0. One token is refused, since its
    centered output is zero. The model may be wrapped for distributed training.

    >>> timm_moe_dg.losses.force_tokens(timm.create_model("moge_tiny"), 256)
    """
    if num_tokens < 0 or num_tokens == 1:
        raise ArgumentError.of("num_tokens", num_tokens, "give 2 or more tokens (the default is 256), or 0 for none")
    for layer in _layers(model):
        layer.forced_tokens = num_tokens


def discovered_domains(routing: RouterOutput) -> Tensor:
    """Recorded routing of a MoGE layer -> (B,) int64, best expert without noise; -1 for samples without metadata."""
    domains = routing.probabilities.detach().argmax(dim=-1)
    return domains if routing.routed is None else domains.masked_fill(~routing.routed, -1)


def moge_losses(model: nn.Module, targets: Tensor, temperature: float = 0.1) -> dict[str, Tensor]:
    """The diversity and the invariance loss of the last training forward (MoGE, equations 2 to 4), unweighted.

    Call this between forward and backward, once per forward, with that forward's class indices (B,). In training, each
    forward of a MoGE layer replaces its report: the class token after its shared expert, and the outputs of all routed
    experts for the forced tokens. The model may be wrapped for distributed training.

    "cka_loss" is the mean over the layers with forced tokens, and "supcon_loss" is of the last layer's shared expert.
    Each is left out of a model without such layers.

    >>> model = timm.create_model("moge_tiny", num_classes=3)
    >>> timm_moe_dg.losses.force_tokens(model, 64)
    >>> logits = model(torch.randn(4, 3, 224, 224), torch.tensor([[13.4, 52.5]]).expand(4, 2))
    >>> sorted(timm_moe_dg.losses.moge_losses(model, torch.tensor([0, 1, 2, 0])))
    ['cka_loss', 'supcon_loss']
    """
    layers = _layers(model)
    if not layers:
        return {}
    last = layers[-1]
    if last.report is None or last.routing is None:
        remedy = "its MoGE layers have no report; run a forward in training mode"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    reports = [layer.report for layer in layers if layer.report is not None]
    forced = [report.forced for report in reports if report.forced is not None]
    losses = {"cka_loss": torch.stack([cka_diversity_loss(outputs) for outputs in forced]).mean()} if forced else {}
    if last.report.shared is not None:
        domains = discovered_domains(last.routing)
        losses["supcon_loss"] = supcon_invariance_loss(last.report.shared, targets, domains, temperature)
    return losses
