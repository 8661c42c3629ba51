"""How MoGE's losses reach what its layers report.

A layer reports in each training forward: the class token that left its shared expert, and the outputs of every routed
expert for the same random tokens, if it was asked to force some. A report replaces the one before.
"""

from typing import cast

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp, RouterOutput
from .specialization import cka_diversity_loss, supcon_invariance_loss

UNKNOWN_DOMAIN = -1


def _layers(model: nn.Module) -> list[GeoMoeMlp]:
    # By attribute: a scripted layer has lost its class, and must be told from a model without any
    return [cast(GeoMoeMlp, module) for module in model.modules() if hasattr(module, "forced_tokens")]


def force_tokens(model: nn.Module, num_tokens: int) -> None:
    """Asks every MoGE layer to send random tokens through all its experts in training, for the diversity loss.

    Args:
        model: Any model, also wrapped for distributed training.
        num_tokens: Tokens per layer and forward, chosen anew each time; 0 stops it.

    Raises:
        ArgumentError: A negative number, or 1, whose centered output is nothing.
    """
    if num_tokens < 0 or num_tokens == 1:
        raise ArgumentError.of("num_tokens", num_tokens, "give 2 or more tokens (the default is 256), or 0 for none")
    for layer in _layers(model):
        layer.forced_tokens = num_tokens


def discovered_domains(routing: RouterOutput) -> Tensor:
    """(B,) int64: the expert with the largest noiseless weight of each sample; -1 for one without metadata.

    Args:
        routing: What a MoGE layer recorded.
    """
    domains = routing.probabilities.detach().argmax(dim=-1)
    return domains if routing.routed is None else domains.masked_fill(~routing.routed, UNKNOWN_DOMAIN)


def moge_losses(model: nn.Module, targets: Tensor, temperature: float = 0.1) -> dict[str, Tensor]:
    """The diversity and the invariance loss of the last training forward (MoGE, equations 2 to 4), unweighted.

    Call it between forward and backward, once per forward.

    Args:
        model: Any model, also wrapped for distributed training.
        targets: (B,) class indices of that forward's images.
        temperature: Of the invariance loss.

    Returns:
        "cka_loss", the mean over the layers that forced tokens, and "supcon_loss", of the last layer's shared expert;
        without such layers, or without a shared expert, they are left out.

    Raises:
        ArgumentError: There are MoGE layers and none has reported.
    """
    layers = _layers(model)
    if not layers:
        return {}
    last = layers[-1]
    if last.report is None or last.routing is None:
        raise ArgumentError.of("model", type(model).__name__, "nothing is reported; run a forward in training mode")
    reports = [layer.report for layer in layers if layer.report is not None]
    forced = [report.forced for report in reports if report.forced is not None]
    losses = {"cka_loss": torch.stack([cka_diversity_loss(outputs) for outputs in forced]).mean()} if forced else {}
    if last.report.shared is not None:
        domains = discovered_domains(last.routing)
        losses["supcon_loss"] = supcon_invariance_loss(last.report.shared, targets, domains, temperature)
    return losses
