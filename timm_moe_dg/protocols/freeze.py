"""Training a new linear classifier on features that stay as they are."""

from typing import Any

from timm.layers import DropPath
from torch import nn

from ..errors import ArgumentError

FREEZABLE = ("backbone",)


def freeze_backbone(network: Any) -> nn.Module:
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
