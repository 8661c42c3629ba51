"""Private names of torch and timm that the package uses, in one place.

Each was seen in torch 2.11 to 2.15 and timm 1.0.31, and has no public name there. No other file uses a private name of
these libraries.
"""

import torch
from timm.models._hub import (
    download_from_hf,  # one file of a Hub repository, in timm's cache; the public loader reads weights alone
    hf_split,  # repository and revision of a name
    load_state_dict_from_path,  # the loader behind local-dir: names
)
from timm.models._input import update_model_args  # records a changed argument in the saved config.json
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # the base class for all dimensions


def in_transforms() -> bool:
    """Whether a transform of torch.func is active, in which values cannot be read. There is no public test."""
    return torch._C._are_functorch_transforms_active()


def values_readable(x: Tensor) -> bool:
    """Returns whether Python code may read the values of a tensor, for instance to validate them.

    False in programs that are exported, traced or compiled, in transforms of torch.func, and on the meta device.
    """
    recorded = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return not (recorded or in_transforms() or x.is_meta)


def in_forward_derivatives() -> bool:
    """Whether forward-mode derivatives are computed, which autograd functions without a jvp refuse."""
    return forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as forwards that gradient checkpointing repeats do."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def assert_async(condition: Tensor, message: str) -> None:
    """Ends the program if a condition on a device is false, without a wait for the device."""
    torch._assert_async(condition, message)
