"""Computing in float32 or better, whatever surrounds a layer, and what kind of program it is run in."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UpcastLinear(nn.Linear):
    """A linear layer in the type of its weights, float32 at least: for what rounding to half precision would spoil.

    It is computed here, not by whoever owns it, so that adapters, offloading and sharding find the forward they wrap.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features) in float32 or better."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = self.bias
        return F.linear(x.to(dtype), self.weight.to(dtype), None if bias is None else bias.to(dtype))


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32, or float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Autocast switched off, on devices that have it (the meta device has none)."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


def portable_path() -> bool:
    """True under export, tracing, compilation or torch.func."""
    recorded = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return recorded or torch._C._are_functorch_transforms_active()


def compiled_path() -> bool:
    """True under torch.compile, whose programs may hold this package's operators; export counts as compiling too."""
    exported = torch.compiler.is_exporting() or torch.jit.is_tracing()
    return torch.compiler.is_compiling() and not exported and not torch._C._are_functorch_transforms_active()


def values_hidden(x: Tensor) -> bool:
    """Whether Python cannot look into tensors: on the meta device, and inside of torch.vmap."""
    return x.is_meta or (torch._C._are_functorch_transforms_active() and _inside_vmap())


def _inside_vmap() -> bool:
    levels = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)
