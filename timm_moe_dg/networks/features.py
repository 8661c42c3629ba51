"""What a network's classifier sees: its features, collected beside its answers."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..errors import ArgumentError
from .build import Network


@contextmanager
def classifier_inputs(network: Network) -> Iterator[list[Tensor]]:
    """Collects the inputs of a network's classifier, (B, D) with each forward; whoever reads them takes them out.

    Args:
        network: Any network of timm's.

    Raises:
        ArgumentError: It has no single classifier.
    """
    seen: list[Tensor] = []
    handle = _classifier(network).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1).float()))
    try:
        yield seen
    finally:
        handle.remove()


class WithFeatures(nn.Module):
    """A network that gives, beside its logits, what its classifier saw: (B, C) and (B, D).

    Args:
        network: One of timm's, of images or of images and metadata.

    Raises:
        ArgumentError: It has no single classifier.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        _classifier(network)
        self.network = network

    def forward(self, images: Tensor, metadata: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) images and their metadata -> logits and features."""
        inputs = (images,) if metadata is None else (images, metadata)
        with classifier_inputs(self.network) as seen:
            logits = self.network(*inputs)
        return logits, seen.pop()


def _classifier(network: Network) -> nn.Module:
    classifier = network.get_classifier()
    if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.Identity):
        remedy = "has no single classifier whose inputs could be kept"
        raise ArgumentError.of("model", type(network).__name__, remedy)
    return classifier
