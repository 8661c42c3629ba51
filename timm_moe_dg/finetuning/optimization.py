"""Optimizer and schedule, timm's by name; by default the papers': Adam, one group, at a constant rate."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from ..algorithms.base import ParameterGroup
from ..errors import ArgumentError

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def check_optimizer(name: str) -> None:
    """Makes sure that timm has the optimizer.

    Raises:
        ArgumentError: It has not.
    """
    if name not in list_optimizers():
        raise ArgumentError.of("opt", name, f"choose from {', '.join(map(str, list_optimizers()))}")


def build_optimizer(
    network: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    layer_decay: float | None = None,
    extra_groups: Sequence[ParameterGroup] = (),
) -> Optimizer:
    """Builds an optimizer of the network's parameters, in one group as DomainBed does.

    PyTorch's own Adam, AdamW and SGD update all parameters in one fused kernel.

    Args:
        network: On its device.
        name: One of timm's optimizers.
        lr: Learning rate.
        weight_decay: Of all parameters alike; with `layer_decay`, not of biases and norms, timm's rule.
        momentum: For optimizers that have it.
        layer_decay: Rate of a layer over that of the one above it; None for the same rate everywhere.
        extra_groups: Groups of parameters that belong to the algorithm.

    Raises:
        ArgumentError: The optimizer does not take these settings.
    """
    fused = get_optimizer_class(name) in _FUSED and next(network.parameters()).device.type in _FUSED_DEVICES
    parameters = network if layer_decay is not None else network.parameters()
    options: dict[str, Any] = {"layer_decay": layer_decay, "momentum": momentum, **({"fused": True} if fused else {})}
    try:
        optimizer = create_optimizer_v2(parameters, name, lr=lr, weight_decay=weight_decay, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ArgumentError.of("opt", name, f"cannot be built ({error})") from error
    for group in extra_groups:
        optimizer.add_param_group(dict(group))
    return optimizer


def build_schedule(
    optimizer: Optimizer, name: str | None, *, steps: int, warmup_steps: int = 0, min_lr: float = 0.0
) -> Scheduler | None:
    """Builds timm's schedule over training steps; call `step_update(number of steps taken)` after each.

    Args:
        optimizer: Whose rates are scheduled; the layers' scales take effect through the schedule.
        name: One of `protocols.options.SCHEDULES`; None for a constant rate.
        steps: Steps of the run, warm-up included.
        warmup_steps: Steps during which the rate rises linearly from 0.
        min_lr: Where the rate ends.

    Returns:
        The schedule, or None where the optimizer's own rates stay as they are.

    Raises:
        ArgumentError: There is nothing left of the run after the warm-up.
    """
    if warmup_steps >= steps:
        raise ArgumentError.of("warmup_steps", warmup_steps, f"is not less than the run's {steps} steps")
    scaled = any("lr_scale" in group for group in optimizer.param_groups)
    if name is None and not warmup_steps and not scaled:
        return None
    schedule, _ = create_scheduler_v2(
        optimizer,
        name or "step",
        num_epochs=steps,
        decay_rate=1.0,  # the power of "poly"; "step" stays constant
        min_lr=min_lr,
        warmup_lr=0.0,
        warmup_epochs=warmup_steps,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule
