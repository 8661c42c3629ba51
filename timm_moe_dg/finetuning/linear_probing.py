"""Linear probing at the start of a run, before the whole network is trained (LP-FT)."""

from torch import nn
from torch.optim import Optimizer

from ..algorithms.base import ParameterGroup
from ..layers import Router
from ..networks.freeze import routers_of
from ..networks.trained import single_classifier
from ..protocols.options import RunOptions


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
