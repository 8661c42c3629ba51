"""What is trained and what stays as it is."""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

from timm.layers import DropPath
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ArgumentError
from ..layers.router import Router
from .build import Network

_logger = logging.getLogger(__name__)


def freeze_backbone(network: Network) -> nn.Module:
    """Draws a new classifier and freezes everything else, such as a MoGE model's shared path (MoGE, section 2.2, i).

    Dropout and stochastic depth are switched off: they would blur features that cannot adapt to them.

    Args:
        network: A timm model with a classifier; changed in place.

    Returns:
        The new classifier.

    Raises:
        ArgumentError: The model has no linear classifier.
    """
    network.reset_classifier(network.num_classes)
    classifier = network.get_classifier()
    if not isinstance(classifier, nn.Linear):
        raise ArgumentError.of("freeze", type(network).__name__, "the model has no linear classifier to train")
    network.requires_grad_(False)
    classifier.requires_grad_(True)
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = 0.0
    return classifier


def train_routers_only(network: nn.Module) -> None:
    """Freezes everything but the routers, the classifier too: it learns where to send tokens, and nothing else.

    Raises:
        ArgumentError: The model has no routers.
    """
    network.requires_grad_(False)
    for router in _routers(network, "all-but-routers"):
        router.requires_grad_(True)


def train_gating_only(network: nn.Module) -> None:
    """Freezes everything but the routers and a MoGE model's location encoder, which decide who answers where.

    What of the encoder does not learn in any case, such as SatCLIP's published weights, stays frozen.

    Raises:
        ArgumentError: The model has no routers, or none that read metadata.
    """
    routers = _routers(network, "all-but-gating")
    encoder = getattr(network, "metadata_encoder", None)
    if encoder is None:
        raise ArgumentError.of("freeze", "all-but-gating", f"{type(network).__name__} does not route by metadata")
    gating = [p for part in (*routers, encoder) for p in part.parameters() if p.requires_grad]
    network.requires_grad_(False)
    for parameter in gating:
        parameter.requires_grad_(True)


def freeze_routers(network: nn.Module) -> None:
    """Freezes the routers and trains everything else.

    Raises:
        ArgumentError: The model has no routers.
    """
    for router in _routers(network, "routers"):
        router.requires_grad_(False)


FREEZABLE: Mapping[str, Callable[[nn.Module], object]] = MappingProxyType(
    {
        "backbone": freeze_backbone,
        "routers": freeze_routers,
        "all-but-routers": train_routers_only,
        "all-but-gating": train_gating_only,
    }
)


def freeze_batch_norm(network: nn.Module) -> None:
    """Keeps the running statistics of batch normalization as they are, and normalizes by them in training too.

    Scales and shifts are trained still. Says so where there is any; vision transformers have none.
    """
    layers = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        layer.eval()
    if layers:
        _logger.info(f"{len(layers)} BatchNorm layers keep their statistics; --no-freeze-bn lets them learn")


def _routers(network: nn.Module, policy: str) -> list[Router]:
    routers = [module for module in network.modules() if isinstance(module, Router)]
    if not routers:
        raise ArgumentError.of("freeze", policy, f"{type(network).__name__} has no routers")
    return routers
