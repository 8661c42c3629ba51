"""What every algorithm is: an objective over one minibatch per training domain, and how a step minimizes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, ProtocolError
from ..losses import auxiliary_loss, moge_losses
from .step import ForwardPass, Minibatches, StepContext, detached, full_precision, mean_scalars

ParameterGroup = dict[str, Any]  # torch's: "params", and its optimizers' options of whatever kind
# How a random search draws a value; or the benchmark's hyper-parameter whose range, on each benchmark, it shares
Distribution = Callable[[np.random.RandomState], float | int] | str


class Range(NamedTuple):
    """A set of numbers.

    Attributes:
        words: What it is called in a message.
        contains: Whether a number is in it.
    """

    words: str
    contains: Callable[[float], bool]


SHARE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
POSITIVE = Range("greater than 0", lambda value: value > 0)


class Tunable(nn.Module):
    """A module with hyper-parameters, whose values are in `hparams`.

    Class attributes:
        HPARAMS: Hyper-parameters and their defaults, beside those of the benchmark; DomainBed's names.
        RANGES: Values that they may have, where that is not every number that is at least 0.

    Args:
        hparams: The run's hyper-parameters, the module's own among them.

    Raises:
        ArgumentError: One is outside its range.
    """

    HPARAMS: ClassVar[Mapping[str, float]] = MappingProxyType({})
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({})

    def __init__(self, hparams: Mapping[str, float]) -> None:
        super().__init__()
        self.hparams = {**self.HPARAMS, **hparams}
        for name, allowed in self.RANGES.items():
            if not allowed.contains(self.hparams[name]):
                raise ArgumentError.of("hparams", {name: self.hparams[name]}, f"{name} must be {allowed.words}")


@dataclass(frozen=True)
class Setup:
    """What an algorithm is built from.

    Attributes:
        network: The timm model with its starting weights, not wrapped, on its device.
        num_domains: Number of training domains.
        domains_per_step: How many of them a step has; None for all.
        num_classes: Size of the classifier.
        hparams: The run's hyper-parameters, the algorithm's own among them.
        aux_coef: Weight of the routers' auxiliary loss, added once per forward pass; models without routers have none.
        aux_form: Whose that loss is, see `losses.router_loss`.
        cka_coef: Weight of MoGE's diversity loss; other models have none, nor has MoGE while no tokens are forced.
        supcon_coef: Weight of MoGE's invariance loss; other models have none.
        supcon_temperature: Its temperature.
        task_loss: Of logits (N, C) and targets (N,), for methods that take another than the plain cross-entropy.
    """

    network: nn.Module
    num_domains: int
    num_classes: int
    hparams: Mapping[str, float] = field(default_factory=dict)
    aux_coef: float = 0.0
    cka_coef: float = 0.0
    supcon_coef: float = 0.0
    supcon_temperature: float = 0.1
    task_loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    domains_per_step: int | None = None
    aux_form: str = "vmoe"

    @property
    def step_domains(self) -> int:
        """How many domains, and so minibatches, a step has."""
        return self.domains_per_step or self.num_domains


class Algorithm(Tunable, ABC):
    """A training method.

    A module, so that what a method carries from step to step (buffers, discriminators) is in its `state_dict` and a
    resumed run goes on with it; what is no tensor, an optimizer's state say, goes through `get_extra_state`.

    Methods differ in `objective`. Those with inner loops or a second optimizer (Fish, MLDG, DANN, CDANN) replace
    `update`. Every forward pass adds the model's own losses, computed on that pass; where a step makes several passes,
    their mean counts.

    Class attributes, beside those of `Tunable`:
        SEARCH: Distributions from which a random search draws hyper-parameters, DomainBed's.
        SEARCH_ALIASES: DomainBed's name used to seed each draw, where it calls a hyper-parameter otherwise.
        MIN_DOMAINS: Fewest training domains in a step that the method is defined for.
        OVERRIDES_LR: Whether the method changes the learning rate itself, which a schedule would undo.
        TAKES_TASK_LOSS: Whether the method minimizes `Setup.task_loss`, rather than the plain cross-entropy.
        ACCUMULATES: Whether cutting a step's minibatches into parts leaves a meaning.

    Raises:
        ArgumentError: A hyper-parameter is outside its range.
        ProtocolError: There are too few training domains.
    """

    SEARCH: ClassVar[Mapping[str, Distribution]] = MappingProxyType({})
    SEARCH_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    MIN_DOMAINS: ClassVar[int] = 1
    OVERRIDES_LR: ClassVar[bool] = False
    TAKES_TASK_LOSS: ClassVar[bool] = False
    ACCUMULATES: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.hparams)
        if setup.step_domains < self.MIN_DOMAINS:
            remedy = f"needs {self.MIN_DOMAINS} training domains and was given {setup.step_domains}"
            raise ProtocolError.of("algorithm", type(self).__name__, remedy)
        self.num_domains = setup.num_domains
        self.num_classes = setup.num_classes
        self.aux_coef, self.aux_form = setup.aux_coef, setup.aux_form
        self.task_loss = setup.task_loss
        self.specialization_coefs = {"cka_loss": setup.cka_coef, "supcon_loss": setup.supcon_coef}
        self.supcon_temperature = setup.supcon_temperature

    @abstractmethod
    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Computes what is to be minimized.

        Args:
            context: Its model maps images (B, 3, H, W) to logits (B, num_classes).
            minibatches: Images and targets of each training domain.

        Returns:
            Scalars: "loss", which is minimized, and its parts for the records.
        """

    def parameter_groups(self, lr: float, weight_decay: float) -> list[ParameterGroup]:
        """Returns further groups for the run's optimizer, with their own rates; none for most methods."""
        return []

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Takes one step on the objective; methods with inner loops or a second optimizer replace this.

        Args:
            context: The model and what steps it.
            minibatches: Images and targets of each training domain.

        Returns:
            The objective's scalars, detached, the mean over the parts of an accumulated step.

        Raises:
            ArgumentError: The method does not accumulate, or a minibatch is too small to be cut.
        """
        parts = self.chunk(minibatches, context.grad_accum_steps)
        context.optimizer.zero_grad()
        scalars = []
        for position, part in enumerate(parts, start=1):
            with context.synchronized(last=position == len(parts)):
                losses = self.objective(context, part)
                context.backward(losses["loss"] / len(parts))
            scalars.append(detached(losses))
        self.share_gradients(context)
        context.optimizer.step()
        return mean_scalars(scalars)

    def present(self, context: StepContext) -> list[int]:
        """Positions, among all training domains, of those that the step's minibatches come from."""
        return list(range(self.num_domains) if context.domains is None else context.domains)

    def share_gradients(self, context: StepContext) -> None:
        """Averages over processes the gradients of the method's own parameters, which no launcher wraps."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = context.reduce(parameter.grad)

    def chunk(self, minibatches: Minibatches, parts: int) -> list[Minibatches]:
        """Cuts every domain's minibatch into equal parts; each part has all domains."""
        if parts == 1:
            return [minibatches]
        if not self.ACCUMULATES:
            name = type(self).__name__
            raise ArgumentError.of("grad_accum_steps", parts, f"{name} has no meaning on parts of a step; leave it 1")
        sizes = {len(minibatch[0]) for minibatch in minibatches}
        if any(size % parts for size in sizes):
            raise ArgumentError.of("grad_accum_steps", parts, f"does not divide the batch of {sorted(sizes)} images")
        cuts = [zip(*(column.chunk(parts) for column in minibatch), strict=True) for minibatch in minibatches]
        return [list(part) for part in zip(*cuts, strict=True)]

    def forward_domains(self, model: nn.Module, minibatches: Minibatches) -> ForwardPass:
        """Runs the model once on the images of all given minibatches together."""
        images, targets, *metadata = (torch.cat(column) for column in zip(*minibatches, strict=True))
        logits = full_precision(model(images, *metadata))
        aux_loss = auxiliary_loss(model, self.aux_form)
        special = moge_losses(model, targets, self.supcon_temperature)
        own_loss = self.aux_coef * aux_loss
        for name, loss in special.items():
            own_loss = own_loss + self.specialization_coefs[name] * loss
        sizes = [len(minibatch[1]) for minibatch in minibatches]
        return ForwardPass(logits, targets, sizes, own_loss, {"aux_loss": aux_loss, **special})
