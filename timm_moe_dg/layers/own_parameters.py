"""Initialization and weight decay of modules that define parameters, as opposed to modules composed of others."""

from typing import ClassVar

from torch import nn


class OwnParameters(nn.Module):
    """Base of modules that initialize their parameters in every mode of timm's `init_weights`.

    timm calls `init_weights` of a module in its named modes and `reset_parameters` in the plain one, children first.
    Subclasses name their parameters without weight decay in `undecayed`.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    __jit_ignored_attributes__: ClassVar[list[str]] = ["undecayed"]  # still readable from Python after scripting

    def reset_parameters(self) -> None:
        """Initializes the parameters."""
        raise NotImplementedError(f"{type(self).__name__} defines no reset_parameters")

    def init_weights(self) -> None:
        """Same as `reset_parameters`, under the other name that timm calls."""
        self.reset_parameters()


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Returns the names of all parameters that a model's modules exempt from weight decay."""
    # Rules by number of dimensions do not cover these. Stacked biases are (E, features). Decaying the codes of a cosine
    # router would only change their effective learning rate, since the cosine ignores their length.
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in getattr(module, "undecayed", ())  # not by isinstance: scripted modules have another class
        if getattr(module, name) is not None
    }
