"""Base class of training methods: an objective over one minibatch per training domain, and a step that minimizes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, ProtocolError
from ..layers import LossWeights, after_step
from ..losses import reported_losses
from .step import ForwardPass, Minibatches, StepContext, detached, full_precision, mean_scalars

ParameterGroup = dict[str, Any]  # "params" and an optimizer's options, as torch has it
# A function that draws a value, or the name of the benchmark's hyper-parameter from whose range it is drawn
Distribution = Callable[[np.random.RandomState], float | int] | str


class Range(NamedTuple):
    """A set of numbers."""

    words: str  # its description in a message
    contains: Callable[[float], bool]


SHARE = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
POSITIVE = Range("greater than 0", lambda value: value > 0)


class Tunable(nn.Module):
    """A module with hyper-parameters, whose values are in `hparams`.

    Class attributes:
        HPARAMS: Hyper-parameters and their defaults, beside those of the benchmark, by DomainBed's names.
        RANGES: Their ranges; every number of at least 0 for those that are not listed.
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
    """Arguments of a training method."""

    network: nn.Module  # timm model with its starting weights, not wrapped, on its device
    num_domains: int  # training domains
    num_classes: int
    _: KW_ONLY
    hparams: Mapping[str, float] = field(default_factory=dict)
    loss_weights: LossWeights = field(default_factory=LossWeights)  # of the losses that the network reports
    task_loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy  # logits (N, C), targets (N,)
    domains_per_step: int | None = None  # None for all

    @property
    def step_domains(self) -> int:
        """Number of domains, and so of minibatches, in a step."""
        return self.domains_per_step or self.num_domains


class Algorithm(Tunable, ABC):
    """A training method.

    A method is a module, so that a resumed run continues with the buffers and discriminators in its `state_dict`.
    State that is no tensor, such as an optimizer's, goes through `get_extra_state`.

    Methods differ in `objective`. Those with inner loops or a second optimizer (Fish, MLDG, DANN, CDANN) replace
    `update`. Every forward pass adds the losses that the network reports. Several passes take their mean.

    Class attributes, beside those of `Tunable`:
        SEARCH: DomainBed's distributions, from which a random search draws hyper-parameters.
        SEARCH_ALIASES: DomainBed's name of a hyper-parameter that has another name here; it seeds the draw.
        MIN_DOMAINS: Smallest number of training domains in a step.
        OVERRIDES_LR: Whether the method changes the learning rate itself, which a schedule would undo.
        TAKES_TASK_LOSS: Whether the method minimizes `Setup.task_loss` instead of the plain cross-entropy.
        TAKES_LINEAR_STEPS: Whether the method can train the classifier alone in the first steps of a run.
        ACCUMULATES: Whether the method can be computed on parts of a step's minibatches.
        SHARDS: Whether the method works on a network that is divided over processes, whose weights are DTensors.

    >>> class WorstDomain(timm_moe_dg.algorithms.Algorithm):
    ...     def objective(self, context, minibatches):
    ...         out = self.forward_domains(context.model, minibatches)
    ...         return out.scalars(out.risks().max(), task_loss=out.risks().mean())
    """

    SEARCH: ClassVar[Mapping[str, Distribution]] = MappingProxyType({})
    SEARCH_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    MIN_DOMAINS: ClassVar[int] = 1
    OVERRIDES_LR: ClassVar[bool] = False
    TAKES_TASK_LOSS: ClassVar[bool] = False
    TAKES_LINEAR_STEPS: ClassVar[bool] = True
    ACCUMULATES: ClassVar[bool] = True
    SHARDS: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.hparams)
        if setup.step_domains < self.MIN_DOMAINS:
            remedy = f"needs {self.MIN_DOMAINS} training domains and was given {setup.step_domains}"
            raise ProtocolError.of("algorithm", type(self).__name__, remedy)
        self.num_domains = setup.num_domains
        self.num_classes = setup.num_classes
        self.loss_weights = setup.loss_weights
        self.task_loss = setup.task_loss

    @abstractmethod
    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns the scalar "loss" to minimize, and its parts for the records."""

    def parameter_groups(self, lr: float, weight_decay: float) -> list[ParameterGroup]:
        """Returns the method's parameters for the run's optimizer, with their learning rates; none by default."""
        return []

    @property
    def trains_network(self) -> bool:
        """Whether the last `update` was a step of the network. Others move no bias and no thresholds of routers."""
        return True

    def take_step(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Takes a step of a run: one `update`, whatever inner steps it takes, and the routers' `after_step`."""
        scalars = self.update(context, minibatches)
        # Steps are skipped by the scaling of float16 gradients
        if self.trains_network and not getattr(context.optimizer, "step_was_skipped", False):
            after_step(context.model)
        return scalars

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Updates the weights. Returns the objective's scalars, detached, the mean over an accumulated step's parts."""
        parts = self.chunk(minibatches, context.grad_accum_steps)
        context.optimizer.zero_grad()
        scalars = []
        for position, part in enumerate(parts, start=1):
            # A distributed model exchanges gradients in the last part of a step alone
            separate = nullcontext if position == len(parts) else getattr(context.model, "no_sync", nullcontext)
            with separate():
                losses = self.objective(context, part)
                context.backward(losses["loss"] / len(parts))
            scalars.append(detached(losses))
        self.share_gradients(context)
        context.optimizer.step()
        return mean_scalars(scalars)

    def present(self, context: StepContext) -> list[int]:
        """Returns the positions, among all training domains, of the domains in this step."""
        return list(range(self.num_domains) if context.domains is None else context.domains)

    def present_rows(self, context: StepContext) -> list[int] | slice:
        """Returns an index of the rows that belong to the domains in this step. A slice is not sent to the device."""
        return slice(None) if context.domains is None else list(context.domains)

    def share_gradients(self, context: StepContext) -> None:
        """Averages the gradients of the method's parameters over processes; the launcher wraps only the network."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = context.reduce(parameter.grad)

    def chunk(self, minibatches: Minibatches, parts: int) -> list[Minibatches]:
        """Cuts every domain's minibatch into equal parts; each part has all domains."""
        if parts == 1:
            return [minibatches]
        if not self.ACCUMULATES:
            name = type(self).__name__
            raise ArgumentError.of("grad_accum_steps", parts, f"{name} needs a whole step at once; leave it 1")
        sizes = {len(minibatch[0]) for minibatch in minibatches}
        if any(size % parts for size in sizes):
            raise ArgumentError.of("grad_accum_steps", parts, f"does not divide the batch of {sorted(sizes)} images")
        cuts = [zip(*(column.chunk(parts) for column in minibatch), strict=True) for minibatch in minibatches]
        return [list(part) for part in zip(*cuts, strict=True)]

    def forward_domains(self, model: nn.Module, minibatches: Minibatches) -> ForwardPass:
        """Runs the model once on the images of all given minibatches together."""
        images, targets, *metadata = (torch.cat(column) for column in zip(*minibatches, strict=True))
        logits = full_precision(model(images, *metadata))
        sizes = [len(minibatch[1]) for minibatch in minibatches]
        losses = reported_losses(model, targets, self.loss_weights, sizes)
        model_loss = reduce(add, (loss.weight * loss.value for loss in losses.values()))
        parts = {name: loss.value for name, loss in losses.items()}
        return ForwardPass(logits, targets, sizes, model_loss=model_loss, parts=parts)
