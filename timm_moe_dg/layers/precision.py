"""Computation in float32 or better inside layers of any type, and what may be done with tensors there."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import in_transforms


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


def values_readable(x: Tensor) -> bool:
    """Returns whether Python code may read the values of a tensor, for instance to validate them.

    False in programs that are exported, traced or compiled, in transforms of torch.func, and on the meta device.
    """
    recorded = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return not (recorded or in_transforms() or x.is_meta)
