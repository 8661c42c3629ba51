"""Optimizers and schedules of timm, and linear probing at the start of a run.

The default is the papers': Adam, one parameter group, a constant rate. Every expert gets the update that its dense
layer would get. Optimizers that look at shapes or norms of parameters therefore see each expert's part of a stack as a
parameter of its own. Of these, kron draws random probes for each parameter (equal in all processes), so that equal
experts, like equal dense layers, are updated alike only on average.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm import optim as timm_optim
from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn, optim
from torch.optim import Optimizer

from ..algorithms.base import ParameterGroup
from ..errors import ArgumentError
from ..layers import Router, layer_parameters
from ..networks.freeze import routers_of
from ..networks.trained import single_classifier
from ..protocols.options import RunOptions

_FUSED = (optim.Adam, optim.AdamW, optim.SGD)
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
# Each number is updated by itself, so stacks of experts can stay whole. Cautious variants scale by a mean over tensors.
_ELEMENTWISE = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.NAdam, optim.RAdam, optim.RMSprop),
    *(optim.SGD, timm_optim.AdaBelief, timm_optim.AdamWLegacy, timm_optim.Adan, timm_optim.Adopt, timm_optim.LaProp),
    *(timm_optim.Lion, timm_optim.MADGRAD, timm_optim.NAdamLegacy, timm_optim.NAdamW, timm_optim.RAdamLegacy),
    *(timm_optim.RMSpropTF, timm_optim.SGDW),
)


def check_optimizer(name: str) -> None:
    """Checks that timm has an optimizer, and that it takes a step here from first derivatives.

    `lookahead_NAME` is refused, because methods that reset the optimizer would leave the moments of NAME.
    """
    if name.lower() not in list_optimizers():
        raise ArgumentError.of("opt", name, f"is none of timm's; choose from {', '.join(map(str, list_optimizers()))}")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    parameter = nn.Parameter(torch.ones(8, 4, device=device))
    parameter.grad = torch.ones_like(parameter)
    try:
        create_optimizer_v2([parameter], name, lr=1e-3).step()
    except Exception as error:  # of any library behind a name
        reason = str(error).partition("\n")[0]
        raise ArgumentError.of("opt", name, f"takes no step here ({reason}); choose another") from error


def build_optimizer(
    network: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float,
    momentum: float = 0.9,
    layer_decay: float | None = None,
    extra_groups: Sequence[ParameterGroup] = (),
    in_turn: bool = False,
) -> Optimizer:
    """Builds an optimizer of the network's parameters, by default in one group like DomainBed.

    `layer_decay` is the ratio of the learning rates of a layer and the one above it. With it, biases and norms have no
    weight decay, as in timm. `in_turn` is for parameters that do not all start training at the same step.
    """
    kind = get_optimizer_class(name)
    # PyTorch's own Adam, AdamW and SGD update all parameters in one fused kernel
    fused = kind in _FUSED and next(network.parameters()).device.type in _FUSED_DEVICES
    fused = fused and not (in_turn and kind is optim.SGD)  # which fails while only some parameters have momentum
    parameters = network if layer_decay is not None else network.parameters()
    further = {"fused": True} if fused else {"deterministic": True} if name.lower().startswith("kron") else {}
    options: dict[str, Any] = {"layer_decay": layer_decay, "momentum": momentum, **further}
    try:
        optimizer = create_optimizer_v2(parameters, name, lr=lr, weight_decay=weight_decay, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise ArgumentError.of("opt", name, f"cannot be built ({error})") from error
    if type(optimizer) not in _ELEMENTWISE or optimizer.defaults.get("caution"):
        for group in optimizer.param_groups:
            group["params"] = layer_parameters(network, group["params"])
    for group in extra_groups:
        optimizer.add_param_group(dict(group))
    return optimizer


def build_schedule(
    optimizer: Optimizer, name: str | None, *, steps: int, warmup_steps: int = 0, min_lr: float = 0.0
) -> Scheduler | None:
    """Builds timm's schedule over training steps; None if all rates are constant.

    Call `step_update(number of steps taken)` after each step. The layers' learning rates with `layer_decay` take effect
    through the schedule. The warm-up rises linearly from 0 to the learning rate, and the decay takes the other steps.
    """
    if warmup_steps >= steps:
        raise ArgumentError.of("warmup_steps", warmup_steps, f"is not less than the run's {steps} steps")
    scaled = any("lr_scale" in group for group in optimizer.param_groups)
    if name is None and not warmup_steps and not scaled:
        return None
    schedule, _ = create_scheduler_v2(
        optimizer,
        name or "step",
        num_epochs=steps - warmup_steps,
        decay_rate=1.0,  # the power of "poly"; "step" stays constant
        min_lr=min_lr,
        warmup_lr=0.0,
        warmup_epochs=warmup_steps,
        warmup_prefix=True,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return schedule


class LinearProbing:
    """Restricts the optimizer to a network's classifier for the first steps of a run.

    A random classifier would distort pretrained features in its first steps (Kumar et al., ICLR 2022,
    arXiv:2202.10054). The options have DomainBed's names. Its code takes one step more than `linear_steps`, and starts
    a new optimizer afterwards. Here the optimizer keeps the classifier's moments. Parameters of the training method,
    such as discriminators, are trained from the first step on. Call `start_step` before each step.

    Args:
        network: timm model, not wrapped.
        optimizer: Optimizer of the network's parameters, before accelerate wraps it.
        options: Of these, `linear_steps`, `linear_lr` and `linear_routers`.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer, options: RunOptions) -> None:
        self.steps, self.lr = options.linear_steps, options.linear_lr
        probed = [single_classifier(network)]
        if options.linear_routers:
            probed += routers_of(network, "linear_routers", True)
        self._trained = {id(parameter) for module in probed for parameter in module.parameters()}
        self._frozen = [parameter for parameter in network.parameters() if id(parameter) not in self._trained]
        # Their bias and thresholds move without a gradient
        routers = () if options.linear_routers else network.modules()
        self._frozen_routers = [module for module in routers if isinstance(module, Router)]
        self._is_probing = False
        self._usual_rates: list[tuple[ParameterGroup, float]] = []
        optimizer.register_step_pre_hook(self._restrict)
        optimizer.register_step_post_hook(self._restore)

    def start_step(self, step: int) -> None:
        """Sets the step that is about to be taken, counted from 0."""
        self._is_probing = step < self.steps
        for router in self._frozen_routers:
            router.frozen = self._is_probing

    def _restrict(self, optimizer: Optimizer, *_: object) -> None:
        """Drops gradients before an update, because optimizers skip parameters that have none."""
        if not self._is_probing:
            return
        for parameter in self._frozen:
            parameter.grad = None
        for group in optimizer.param_groups:
            # An optimizer may hold parts of a stack, see `layer_parameters`
            members = {id(getattr(parameter, "stack", parameter)) for parameter in group["params"]}
            if self.lr is not None and members & self._trained:
                self._usual_rates.append((group, group["lr"]))
                group["lr"] = self.lr

    def _restore(self, *_: object) -> None:
        while self._usual_rates:
            group, rate = self._usual_rates.pop()
            group["lr"] = rate
