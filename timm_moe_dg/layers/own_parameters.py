"""What a module with parameters of its own says about them: how they are drawn, which decay, and how old ones load."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn


class OwnParameters(nn.Module):
    """Draws its own parameters in every mode of timm's `init_weights`, and names those that take no weight decay.

    timm calls `init_weights` of a module in its named modes and `reset_parameters` in the plain one, children first.

    Attributes:
        undecayed: Names of the module's own parameters that take no weight decay.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    __jit_ignored_attributes__: ClassVar[list[str]] = ["undecayed"]  # a scripted module keeps it for Python

    def reset_parameters(self) -> None:
        """Draws the parameters anew; each subclass says how."""
        raise RuntimeError(f"{type(self).__name__} does not say how its parameters are drawn")

    def init_weights(self) -> None:
        """The same, under the other name that timm calls."""
        self.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        own = {prefix + name: value for name, value in self._parameters.items() if value is not None}
        give_scalars_an_axis(state_dict, own)
        super()._load_from_state_dict(state_dict, prefix, *args)  # `args` are torch's, passed on as they come


def give_scalars_an_axis(loaded: dict[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Turns values of shape () into (1,) where a model has it so; older checkpoints hold scales and gates as scalars.

    Args:
        loaded: The checkpoint, changed in place.
        own: The parameters that it is for, by the same names.
    """
    for name in loaded.keys() & own.keys():
        if loaded[name].ndim == 0 and own[name].shape == (1,):
            loaded[name] = loaded[name].reshape(1)


def undecayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that the modules of a model exempt from weight decay.

    Expert biases are (E, features), so rules by number of dimensions would decay them; the length of an expert's code
    does not matter to a cosine, so decaying it only changes the effective learning rate.
    """
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in _undecayed(module)
        if getattr(module, name) is not None
    }


def _undecayed(module: nn.Module) -> Iterable[str]:
    return getattr(module, "undecayed", ())  # by name, as a scripted module has lost its class
