"""Hooks that store inputs or outputs of a network's modules, for methods on features."""

from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers.text_head import TextHead
from .step import full_precision


class Tap:
    """Stores one tensor of the last forward pass of a network in training mode, or of a `frozen` one in any mode."""

    def __init__(self, network: nn.Module, *, frozen: bool = False) -> None:
        self._network = network
        self._frozen = frozen
        self._stored: Tensor | None = None

    # Evaluations, also those of an averaged copy of the network, must store nothing
    def store_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: stores the module's first input."""
        if self._network.training:
            self._stored = inputs[0]

    def store_output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Forward hook: stores the module's output."""
        if self._network.training or self._frozen:
            self._stored = output

    def take(self) -> Tensor:
        """Returns the stored tensor in float32 or better, and clears it."""
        if self._stored is None:
            raise ArgumentError.of("model", None, "no forward pass in training mode went through the tapped module")
        stored, self._stored = self._stored, None
        return full_precision(stored)


def classifier_of(network: nn.Module, method: str) -> nn.Linear:
    """Returns the last layer of a timm model. Anything but one linear layer is an `ArgumentError`."""
    classifier = getattr(network, "get_classifier", lambda: None)()
    if not isinstance(classifier, nn.Linear):
        remedy = f"{method} needs a linear classifier and this is {type(classifier).__name__}; take another model"
        raise ArgumentError.of("model", type(network).__name__, remedy)
    return classifier


def tap_features(network: nn.Module, method: str) -> Tap:
    """Taps the inputs of a linear classifier or of a text head, (B, D)."""
    tap, classifier = Tap(network), getattr(network, "get_classifier", lambda: None)()
    if not isinstance(classifier, TextHead):
        classifier = classifier_of(network, method)
    classifier.register_forward_pre_hook(tap.store_input)
    return tap
