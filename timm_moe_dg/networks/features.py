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
    classifier = network.get_classifier()
    if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.Identity):
        remedy = "has no single classifier whose inputs could be kept"
        raise ArgumentError.of("model", type(network).__name__, remedy)
    seen: list[Tensor] = []
    handle = classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(1).float()))
    try:
        yield seen
    finally:
        handle.remove()
