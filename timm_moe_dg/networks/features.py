"""Features of a network: the inputs of its classifier, collected during forward passes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import ArgumentError
from .build import Network


@contextmanager
def classifier_inputs(network: Network) -> Iterator[list[Tensor]]:
    """Collects the inputs of a network's classifier, one (B, D) tensor per forward. The caller empties the list."""
    collected: list[Tensor] = []
    classifier = _classifier(network)
    handle = classifier.register_forward_pre_hook(lambda _, inputs: collected.append(inputs[0].flatten(1).float()))
    try:
        yield collected
    finally:
        handle.remove()


class WithFeatures(nn.Module):
    """A timm model that returns logits (B, C) and the inputs (B, D) of its classifier, which must be a single one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        _classifier(network)
        self.network = network

    def forward(self, images: Tensor, metadata: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) images and their metadata -> logits and features."""
        inputs = (images,) if metadata is None else (images, metadata)
        with classifier_inputs(self.network) as collected:
            logits = self.network(*inputs)
        return logits, collected.pop()


def _classifier(network: Network) -> nn.Module:
    classifier = network.get_classifier()
    if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.Identity):
        raise ArgumentError.of("model", type(network).__name__, "has no single classifier; take a model with one")
    return classifier
