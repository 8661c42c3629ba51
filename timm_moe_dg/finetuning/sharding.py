"""Networks that FSDP2 divides over processes, for networks larger than one device.

Each process holds its shard of every parameter, of the optimizer's state and of an average of weights. A block gathers
its weights when it computes. Checkpoints and `best/` hold whole weights, gathered in the main process's host memory.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from accelerate.utils.environment import parse_flag_from_env
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..algorithms import Averaging, get_algorithm, get_averaging
from ..compat import BatchNorm
from ..errors import ArgumentError
from ..layers import RoutedMlp
from ..layers.experts import StackedExperts
from ..protocols.options import RunOptions

FLAG = "ACCELERATE_USE_FSDP"
_WHOLE = "needs whole weights in every process; launch without --use_fsdp"
# Settings of the launcher that would change the run, and what to do instead
_SETTINGS = {
    "OFFLOAD_PARAMS": "is not supported; leave out --fsdp_offload_params",
    "ACTIVATION_CHECKPOINTING": "leave out --fsdp_activation_checkpointing and give --grad-checkpointing",
}


def is_sharded() -> bool:
    """Whether this process was launched with `accelerate launch --use_fsdp`."""
    return parse_flag_from_env(FLAG)


@contextmanager
def fsdp_hidden() -> Iterator[None]:
    """Hides the launcher's request, because accelerate ignores it on CPUs and chooses other units on GPUs."""
    value = os.environ.pop(FLAG, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[FLAG] = value


def check_sharding(options: RunOptions, *, num_processes: int, mixed_precision: str) -> None:
    """Refuses what a divided network cannot do."""
    if os.environ.get("FSDP_VERSION", "1") != "2":
        remedy = "is not supported; add --fsdp_version 2"
        raise ArgumentError.of("fsdp_version", int(os.environ.get("FSDP_VERSION", "1")), remedy)
    for name, remedy in _SETTINGS.items():
        if parse_flag_from_env(f"FSDP_{name}"):
            raise ArgumentError.of(f"fsdp_{name.lower()}", True, remedy)
    if num_processes < 2:
        raise ArgumentError.of("num_processes", num_processes, "FSDP divides a network over two or more; add processes")
    if mixed_precision == "fp16":
        raise ArgumentError.of("amp_dtype", "float16", "is not supported with --use_fsdp; give bfloat16")
    if not get_algorithm(options.algorithm).SHARDS:
        raise ArgumentError.of("algorithm", options.algorithm, _WHOLE)
    if options.averaging and not get_averaging(options.averaging).SHARDS:
        raise ArgumentError.of("averaging", options.averaging, f"{_WHOLE}, or give ema or moving")
    for name in ("compile", "channels_last"):
        if vars(options)[name]:
            raise ArgumentError.of(name, True, "is not supported with --use_fsdp; leave it out")


class Sharding:
    """Divides a network, which is changed in place and moved to its device, and collects its whole weights."""

    def __init__(self, network: nn.Module, averaging: Averaging | None, device: torch.device) -> None:
        if any(isinstance(module, BatchNorm) and module.training for module in network.modules()):
            remedy = "BatchNorm's statistics would differ between processes; add --freeze-bn"
            raise ArgumentError.of("model", type(network).__name__, remedy)
        self._structure = deepcopy(network).to("meta")
        mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() != "false",
            "shard_placement_fn": lambda parameter: _placement(parameter, mesh.size()),
        }
        # Mixtures change no output of their experts in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .FSDPStackedExperts. returned a view")
        for part in (network, *(averaging.children() if averaging else ())):
            for module in _units(part):
                fully_shard(module, **options)
                if isinstance(module, StackedExperts):
                    register_fsdp_forward_method(module, "forward_all")  # for the diversity loss
            # The weights outside of the units too, or averages would be read while they are gathered
            fully_shard(part, **{**options, "reshard_after_forward": True})

    def whole_network(self, network: nn.Module, *, main: bool) -> nn.Module:
        """Gathers the weights of the network or its average. Every process calls it, and only the main one has them."""
        structure, weights = deepcopy(self._structure), whole(network.state_dict(), main=main)
        if main:
            structure.load_state_dict(weights, assign=True)
        return structure


def _units(network: nn.Module) -> list[nn.Module]:
    """Returns the modules whose weights are gathered together, inner ones first."""
    units: list[Any] = []
    for name, module in network.named_modules():
        parent, _, index = name.rpartition(".")
        if isinstance(module, RoutedMlp):
            # Gradients of losses that a mixture reports arrive there before that of its block's output
            units += [module.router, module.experts]
        elif index.isdecimal() and parent.endswith("blocks"):
            units.append(module)
    return units[::-1]


def _placement(parameter: nn.Parameter, processes: int) -> Shard:
    """Divides the first axis that has equal parts: experts may be fewer than processes, and embeddings have one row."""
    equal = (axis for axis, size in enumerate(parameter.shape) if size % processes == 0)
    return Shard(next(equal, 0))


def whole(state: Any, *, main: bool = True) -> Any:
    """Gathers the tensors of a nested state to the CPU. Every process calls it, and only the main one has them."""
    if isinstance(state, DTensor):
        gathered = state.full_tensor()
        return gathered.cpu() if main else None
    if isinstance(state, Mapping):
        return {name: whole(value, main=main) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole(value, main=main) for value in state)
    return state


def divided(part: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Divides a whole state like a module's or an optimizer's tensors. Every process has the whole state."""
    if hasattr(part, "param_groups"):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        moments = {
            index: {name: _like(value, parameters[index]) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        return {**state, "state": moments}
    templates = part.state_dict()
    return {name: _like(value, templates.get(name)) for name, value in state.items()}


def _like(value: Any, template: object) -> Any:
    if not isinstance(template, DTensor) or not isinstance(value, Tensor) or value.shape != template.shape:
        return value
    value = value.to(template.device)
    return distribute_tensor(value, template.device_mesh, template.placements, src_data_rank=None)
