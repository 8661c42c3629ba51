"""Losses of whole models: those that their layers report, and access to the recorded routing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ArgumentError
from .layers import GeoMoeMlp, LossWeights, MoeMlp, ReportedLoss, RoutedMlp, Router, RouterOutput
from .layers.reports import BALANCING_LOSSES, domain_balance_loss


def _routed_layers(model: nn.Module) -> dict[str, RoutedMlp]:
    return {name: module for name, module in model.named_modules() if isinstance(module, RoutedMlp)}


def router_outputs(model: nn.Module) -> dict[str, RouterOutput]:
    """Returns the last recorded routing of each mixture layer, by module name.

    Each forward in training replaces the record. In evaluation, only forwards inside `record_routing` do. Layers
    without a record are left out.

    Example:
        >>> model = timm.create_model("gmoe_tiny_patch16")
        >>> logits = model(torch.randn(2, 3, 224, 224))
        >>> timm_moe_dg.router_outputs(model)["blocks.8.mlp"].expert_indices.shape  # 2 x 197 tokens, 2 experts each
        torch.Size([394, 2])
    """
    return {name: layer.routing for name, layer in _routed_layers(model).items() if layer.routing is not None}


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Sum of `Router.loss` over the mixture layers, for the last training forward (GMoE, section 4.3).

    The sum is 0 for a model without mixture layers. Call this between forward and backward, once per forward, and add
    it with a small coefficient (GMoE's code: 0.01). The model may be wrapped for distributed training.

    Example:
        >>> model = timm.create_model("gmoe_tiny_patch16", num_classes=7)
        >>> logits = model(torch.randn(2, 3, 224, 224))
        >>> loss = F.cross_entropy(logits, torch.tensor([0, 6])) + 0.01 * timm_moe_dg.auxiliary_loss(model)
    """
    layers = _routed_layers(model).values()
    recorded = [(layer, routing) for layer in layers if (routing := layer.training_routing()) is not None]
    losses = [_scalar(layer, layer.router.loss(routing)) for layer, routing in recorded]
    if layers and not losses:
        remedy = "its mixture layers have recorded no routing; run a forward in training mode"
        raise ArgumentError.of("model", type(model).__name__, remedy)
    return torch.stack(losses).sum() if losses else _zero(model)


def _scalar(module: nn.Module, value: object) -> Tensor:
    """Checks what a router or another module returned as a loss."""
    if not isinstance(value, Tensor) or value.ndim:
        words = tuple(value.shape) if isinstance(value, Tensor) else value
        remedy = f"{type(module).__name__} must report a scalar tensor, or a ReportedLoss of one"
        raise ArgumentError.of("loss", words, remedy)
    return value


def set_auxiliary_form(model: nn.Module, form: str) -> None:
    """Sets the loss of all routers that have none of their own: 'vmoe', or 'tutel' as in GMoE's released code."""
    if form not in BALANCING_LOSSES:
        raise ArgumentError.of("form", form, f"choose one of {', '.join(BALANCING_LOSSES)}")
    for module in model.modules():
        if isinstance(module, Router):
            module.loss_form = form


def _zero(model: nn.Module) -> Tensor:
    return torch.zeros((), device=next((parameter.device for parameter in model.parameters()), None))


def reported_losses(
    model: nn.Module,
    targets: Tensor,
    weights: LossWeights = LossWeights(),  # noqa: B008 (immutable)
    sizes: Sequence[int] | None = None,
) -> dict[str, ReportedLoss]:
    """Returns the losses that a model's modules report of the last training forward, by name.

    Each module with a method `training_losses` is asked, see `layers.reports`. "aux_loss" is 0 without routers.
    Call this between forward and backward, once per forward, with that forward's class indices (B,). The model may be
    wrapped for distributed training. The images are those of domains of these `sizes`, one after the other, by default
    of one domain.

    >>> model = timm.create_model("gmoe_tiny_patch16", num_classes=3)
    >>> logits = model(torch.randn(4, 3, 224, 224))
    >>> list(timm_moe_dg.losses.reported_losses(model, torch.tensor([0, 1, 2, 0])))
    ['aux_loss']
    """
    found: dict[str, list[ReportedLoss]] = {"aux_loss": []}
    module: Any  # with or without this method
    for module in model.modules():
        if hasattr(module, "training_losses"):
            for name, loss in module.training_losses(targets, weights).items():
                _scalar(module, loss.value if isinstance(loss, ReportedLoss) else type(loss).__name__)
                found.setdefault(name, []).append(loss)
    if weights.domain_coef:
        found.setdefault("domain_loss", []).extend(
            ReportedLoss(domain_balance_loss(routing, sizes or [len(targets)]), weights.domain_coef)
            for routing in router_outputs(model).values()
        )
    return {name: _over_modules(losses) if losses else ReportedLoss(_zero(model)) for name, losses in found.items()}


def check_loss_weights(model: nn.Module, weights: LossWeights) -> None:
    """Refuses a weight of a loss that no layer reports. Every run has the others, whatever its model.

    The losses of a user's own module are known after a forward only, so a model with such a module may have any weight.
    """
    reporting = [type(module).__module__ for module in model.modules() if hasattr(module, "training_losses")]
    if {name.partition(".")[0] for name in reporting} - {__name__.partition(".")[0]}:
        return
    for name, kind in {"z_coef": RoutedMlp, "image_coef": MoeMlp, "domain_coef": RoutedMlp}.items():
        if (weight := getattr(weights, name)) and not any(isinstance(module, kind) for module in model.modules()):
            raise ArgumentError.of(name, weight, f"{type(model).__name__} has no such loss; leave it out")


def _over_modules(losses: Sequence[ReportedLoss]) -> ReportedLoss:
    last = losses[-1]
    if last.over_modules == "last":
        return last
    values = torch.stack([loss.value for loss in losses])
    return last._replace(value=values.mean() if last.over_modules == "mean" else values.sum())


def force_tokens(model: nn.Module, num_tokens: int) -> None:
    """Makes every MoGE layer send random tokens through all its experts in training, for the diversity loss.

    Each layer chooses `num_tokens` tokens anew in each forward, or none with 0. One token is refused, since its
    centered output is zero. The model may be wrapped for distributed training.

    >>> timm_moe_dg.losses.force_tokens(timm.create_model("moge_tiny"), 256)
    """
    if num_tokens < 0 or num_tokens == 1:
        raise ArgumentError.of("num_tokens", num_tokens, "give 2 or more tokens (the default is 256), or 0 for none")
    for layer in model.modules():
        if isinstance(layer, GeoMoeMlp):
            layer.forced_tokens = num_tokens


@contextmanager
def record_routing(model: nn.Module) -> Iterator[nn.Module]:
    """Context in which forwards record the routing of each mixture layer in evaluation too.

    Example:
        >>> model = timm.create_model("gmoe_tiny_patch16").eval()
        >>> with torch.inference_mode(), timm_moe_dg.record_routing(model):
        ...     logits = model(torch.randn(2, 3, 224, 224))
        >>> list(timm_moe_dg.router_outputs(model))
        ['blocks.8.mlp', 'blocks.10.mlp']
    """
    layers = _routed_layers(model).values()
    before = [layer.record_routing for layer in layers]
    try:
        for layer in layers:
            layer.record_routing = True
        yield model
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.record_routing = value
