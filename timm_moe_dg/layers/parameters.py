"""Modules that define parameters: initialization, weight decay, precision, and stacks of dense layers."""

import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError


class OwnParameters(nn.Module):
    """Base of modules that initialize their parameters in every mode of timm's `init_weights`.

    timm calls `init_weights` of a module in its named modes and `reset_parameters` in the plain one, children first.
    Subclasses name their parameters without weight decay in `undecayed`. Those that hold the parameters of several
    dense layers name them in `stacked`, with the axis of the layers.
    """

    undecayed: ClassVar[tuple[str, ...]] = ()
    stacked: ClassVar[Mapping[str, int]] = MappingProxyType({})

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
        if isinstance(module, OwnParameters)
        for name in module.undecayed
        if getattr(module, name) is not None
    }


class LayerSlice(nn.Parameter):
    """One dense layer's part of a stacked parameter, which shares memory and gradient with the stack."""

    stack: nn.Parameter
    position: tuple[int, int]  # axis and index

    def __new__(cls, stack: nn.Parameter, axis: int, index: int) -> "LayerSlice":
        """Takes entry `index` along an axis."""
        part: LayerSlice = super().__new__(cls, stack.detach().select(axis, index), stack.requires_grad)
        part.stack, part.position = stack, (axis, index)
        return part

    @property
    def grad(self) -> Tensor | None:
        """The part of the stack's gradient, read anew each time because backward passes replace it."""
        if self.data_ptr() != self.stack.detach().select(*self.position).data_ptr():  # steps would change a copy
            remedy = "the model was moved to another device or type since; move it before"
            raise ArgumentError.of("layer_parameters", tuple(self.stack.shape), remedy)
        return None if self.stack.grad is None else self.stack.grad.select(*self.position)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self.stack.grad = None
            return
        if self.stack.grad is None:
            self.stack.grad = torch.zeros_like(self.stack)
        self.stack.grad.select(*self.position).copy_(value)


def layer_parameters(model: nn.Module, parameters: list[nn.Parameter] | None = None) -> list[nn.Parameter]:
    """Returns a model's parameters, or those given, with each stack replaced by the parameters of its dense layers.

    Stacked experts (E, H, D) become E matrices (H, D), and their biases (E, H) become E vectors, which share memory and
    gradient with the stack. Optimizers and clipping that look at shapes or norms of whole parameters then treat each
    expert like a dense layer. Move the model to its device and type before.

    >>> model = timm.create_model("gmoe_tiny_patch16")
    >>> matrices = [value for value in timm_moe_dg.layers.layer_parameters(model) if value.ndim == 2]
    >>> optimizer = torch.optim.Muon(matrices, lr=1e-3)
    """
    axes = {
        id(stack): axis
        for module in model.modules()
        for name, axis in getattr(module, "stacked", {}).items()
        if (stack := getattr(module, name)) is not None
    }
    parts: list[nn.Parameter] = []
    for parameter in model.parameters() if parameters is None else parameters:
        if (axis := axes.get(id(parameter))) is None:
            parts.append(parameter)
        else:
            parts += [LayerSlice(parameter, axis, index) for index in range(parameter.shape[axis])]
    return parts


class UpcastLinear(nn.Linear):
    """A linear layer that computes in the type of its weights, but at least in float32."""

    # The upcast is in this module's forward rather than in its callers: adapters, offloading and sharding wrap forward

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in float32 or better."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = self.bias
        return F.linear(x.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype))


def upcast(x: Tensor) -> Tensor:
    """Converts to float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Switches autocast off, on devices that have it."""
    if not torch.amp.is_autocast_available(device_type):  # the meta device
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
