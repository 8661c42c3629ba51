"""Hooks that keep what passes through a network's modules, for methods that look at features.

Hooks sit on the modules themselves, so they also see forward passes of a wrapped network. They keep while the network
is in training mode only: an evaluation, or that of an averaged copy of the network, leaves nothing behind.
"""

from torch import Tensor, nn

from ..errors import ArgumentError
from .step import full_precision


class Tap:
    """Keeps one tensor of the last forward pass until it is taken.

    Args:
        network: Whose mode decides; that of the module may differ, as a frozen BatchNorm's does.
        frozen: The network is never in training mode; keep anyway.
    """

    def __init__(self, network: nn.Module, *, frozen: bool = False) -> None:
        self._network = network
        self._frozen = frozen
        self._kept: Tensor | None = None

    def keep_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: keeps the module's first input."""
        if self._network.training:
            self._kept = inputs[0]

    def keep_output(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Forward hook: keeps the module's output."""
        if self._network.training or self._frozen:
            self._kept = output

    def take(self) -> Tensor:
        """Returns what was kept, float32 or better, and lets go of it.

        Raises:
            ArgumentError: No forward pass went through the module in training mode.
        """
        if self._kept is None:
            raise ArgumentError.of("model", None, "no forward pass in training mode went through the tapped module")
        kept, self._kept = self._kept, None
        return full_precision(kept)


def classifier_of(network: nn.Module, method: str) -> nn.Linear:
    """The last layer of a timm model.

    Raises:
        ArgumentError: It is not one linear layer.
    """
    classifier = getattr(network, "get_classifier", lambda: None)()
    if not isinstance(classifier, nn.Linear):
        remedy = f"{method} needs a linear classifier and this is {type(classifier).__name__}; take another model"
        raise ArgumentError.of("model", type(network).__name__, remedy)
    return classifier


def tap_features(network: nn.Module, method: str) -> Tap:
    """Taps what the classifier is given, (B, D).

    Raises:
        ArgumentError: The classifier is not one linear layer.
    """
    tap = Tap(network)
    classifier_of(network, method).register_forward_pre_hook(tap.keep_input)
    return tap
