"""Freezing of parts of a network: its backbone, trunk, classifier or routers, or all but these."""

import argparse
import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from timm.layers import DropPath, PatchDropout, PatchDropoutWithIndices
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ..errors import ArgumentError
from ..layers.compat import BatchNorm
from ..layers.moe_mlp import MoeMlp, RoutedMlp
from ..layers.router import Router
from .build import Network
from .trained import single_classifier

TRUNK_TOKENS = ("cls_token", "dist_token", "reg_token", "pos_embed")  # parameters of timm's vision transformers
_logger = logging.getLogger(__name__)


def freeze_backbone(network: Network) -> nn.Module:
    """Freezes everything but a new linear classifier, which is initialized and returned (MoGE, section 2.2, i).

    Dropout, stochastic depth, patch dropout, router noise, capacity limits and choice by experts are turned off: frozen
    features cannot adapt to them.
    """
    network.reset_classifier(network.num_classes)
    classifier = network.get_classifier()
    if not isinstance(classifier, nn.Linear):
        raise ArgumentError.of("freeze", type(network).__name__, "the model has no linear classifier to train")
    network.requires_grad_(False)
    classifier.requires_grad_(True)
    network.drop_rate = 0.0  # of convolutional networks, which have no module for it
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, DropPath):
            module.drop_prob = 0.0
        elif isinstance(module, PatchDropout | PatchDropoutWithIndices):
            module.prob = 0.0
        elif isinstance(module, Router):
            module.freeze()
            module.noise_std = 0.0
            if module.choice == "expert":
                module.choice = "token"  # as in evaluation
        elif isinstance(module, MoeMlp):
            module.capacity_factor = None
    return classifier


def frozen_part(text: str) -> str:
    """Reads a part of `FREEZABLE`, trunk, or trunk:N."""
    if text not in FREEZABLE and not re.fullmatch(r"trunk(:[1-9]\d{0,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(FREEZABLE)}, trunk and trunk:N")
    return text


def trunk_depth(network: Network, freeze: str) -> int:
    """Returns the number of blocks in a network's trunk: the N of "trunk:N", else those below the first mixture.

    Raises:
        ArgumentError: The network has no blocks in sequence, or a mixture below the cut, or "trunk" has no mixture.
    """
    name = type(network).__name__
    if not isinstance(network, VisionTransformer | Eva) or getattr(network, "rope_mixed", False):
        raise ArgumentError.of("freeze", freeze, f"{name} is no vision transformer with a trunk; take another model")
    sparse = [any(isinstance(module, RoutedMlp) for module in block.modules()) for block in network.blocks]
    largest = sparse.index(True) if any(sparse) else len(sparse)
    if freeze == "trunk" and not any(sparse):
        raise ArgumentError.of("freeze", freeze, f"{name} has no mixtures; give trunk:N, with N of {largest} blocks")
    depth = int(freeze.partition(":")[2] or largest)
    if not 1 <= depth <= largest:
        remedy = f"{largest} of {len(sparse)} blocks lie below the first mixture; give trunk:N with such an N"
        raise ArgumentError.of("freeze", freeze, remedy)
    return depth


def trunk_modules(network: Network, depth: int) -> list[nn.Module]:
    """Returns the modules of a trunk with a number of blocks. Its tokens and positions are parameters beside these."""
    embedding = (network.patch_embed, network.pos_drop, network.patch_drop, network.norm_pre)
    return [*(module for module in embedding if module is not None), *network.blocks[:depth]]


def freeze_trunk(network: Network, freeze: str) -> None:
    """Freezes a trunk, see `trunk_depth`, and turns off its dropout, stochastic depth and patch dropout."""
    modules = trunk_modules(network, trunk_depth(network, freeze))
    for module in modules:
        module.eval()
    for part in (*modules, *(getattr(network, name, None) for name in TRUNK_TOKENS)):
        if part is not None:
            part.requires_grad_(False)


def train_routers_only(network: nn.Module) -> None:
    """Freezes everything but the routers, the classifier included."""
    routers = routers_of(network, "freeze", "all-but-routers")
    network.requires_grad_(False)
    for router in routers:
        router.requires_grad_(True)


def train_gating_only(network: nn.Module) -> None:
    """Freezes everything but the routers and a MoGE model's metadata encoder.

    Parts of the encoder that are never trained, such as SatCLIP's published weights, stay frozen.
    """
    routers = routers_of(network, "freeze", "all-but-gating")
    encoder = getattr(network, "metadata_encoder", None)
    if encoder is None:
        raise ArgumentError.of("freeze", "all-but-gating", f"{type(network).__name__} does not route by metadata")
    gating = [p for part in (*routers, encoder) for p in part.parameters() if p.requires_grad]
    network.requires_grad_(False)
    for parameter in gating:
        parameter.requires_grad_(True)


FREEZABLE: Mapping[str, Callable[[nn.Module], object]] = MappingProxyType(
    {
        "backbone": freeze_backbone,
        "classifier": lambda network: single_classifier(network).requires_grad_(False),
        "routers": lambda network: [router.freeze() for router in routers_of(network, "freeze", "routers")],
        "all-but-routers": train_routers_only,
        "all-but-gating": train_gating_only,
    }
)


def freeze_batch_norm(network: nn.Module) -> None:
    """Freezes the running statistics of batch normalization, used in training too. Scales and shifts are trained."""
    layers = [module for module in network.modules() if isinstance(module, BatchNorm)]
    for layer in layers:
        layer.eval()
    if layers:
        _logger.info(f"{len(layers)} BatchNorm layers keep their statistics; --no-freeze-bn lets them learn")


def routers_of(network: nn.Module, argument: str, value: object) -> list[Router]:
    """Returns a network's routers. None is an `ArgumentError` about an argument and its value."""
    routers = [module for module in network.modules() if isinstance(module, Router)]
    if not routers:
        raise ArgumentError.of(argument, value, f"{type(network).__name__} has no routers")
    return routers
