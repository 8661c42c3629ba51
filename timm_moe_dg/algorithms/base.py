"""What every algorithm is: an objective over one minibatch per training domain, and how a step minimises it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..errors import ArgumentError, ProtocolError
from ..losses import auxiliary_loss, moge_losses
from .ranges import Range, check_ranges

# Per training domain: images (B, 3, H, W), targets (B,), and metadata for models that take them
Minibatches = Sequence[tuple[Tensor, ...]]
Draw = Callable[[np.random.RandomState], float | int]


@dataclass(frozen=True)
class Setup:
    """What an algorithm is built from.

    Attributes:
        network: The timm model with its starting weights, not wrapped, on its device.
        num_domains: Number of training domains.
        num_classes: Size of the classifier.
        hparams: The run's hyper-parameters, the algorithm's own among them.
        aux_coef: Weight of the routers' auxiliary loss, added once per forward pass; models without routers have none.
        cka_coef: Weight of MoGE's diversity loss; other models have none, nor has MoGE while no tokens are forced.
        supcon_coef: Weight of MoGE's invariance loss; other models have none.
        supcon_temperature: Its temperature.
    """

    network: nn.Module
    num_domains: int
    num_classes: int
    hparams: Mapping[str, float] = field(default_factory=dict)
    aux_coef: float = 0.0
    cka_coef: float = 0.0
    supcon_coef: float = 0.0
    supcon_temperature: float = 0.1


@dataclass(frozen=True)
class StepContext:
    """What a step is taken with.

    Attributes:
        model: The network as the launcher wrapped it; forward passes go through it, once or several times a step.
        optimizer: Steps the network's parameters and those of `Algorithm.parameter_groups`.
        backward: Computes gradients of a loss, scaled or synchronised as the run needs.
        reduce: Mean of a tensor over processes.
        grad_accum_steps: Parts that a step's minibatches are cut into, to save memory.
        autocast: Context of the run's mixed precision, for networks that the launcher did not wrap.
    """

    model: nn.Module
    optimizer: Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    reduce: Callable[[Tensor], Tensor] = lambda value: value
    grad_accum_steps: int = 1
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext

    def mean_keeping_gradient(self, value: Tensor) -> Tensor:
        """Mean of a statistic over processes, through which this process's own gradient flows.

        The launcher averages gradients over processes, which makes the gradient of a function of the mean exact.
        """
        return value + (self.reduce(value.detach()) - value.detach())


@dataclass(frozen=True)
class ForwardPass:
    """What one forward pass over the images of one or more domains gave.

    Attributes:
        logits: (N, num_classes), float32 or better.
        targets: (N,).
        sizes: Images of each domain, in the order of the minibatches; N in all.
        own_loss: What the model adds to any objective: the routers' auxiliary loss and MoGE's losses, weighted.
        parts: Those losses, unweighted, by name.
    """

    logits: Tensor
    targets: Tensor
    sizes: Sequence[int]
    own_loss: Tensor
    parts: Mapping[str, Tensor]

    def by_domain(self, values: Tensor) -> tuple[Tensor, ...]:
        """Splits (N, ...) values into those of each domain."""
        return values.split(list(self.sizes))

    def sample_risks(self) -> Tensor:
        """(N,) cross-entropy of each image."""
        return F.cross_entropy(self.logits, self.targets, reduction="none")

    def risks(self) -> Tensor:
        """(M,) mean cross-entropy of each domain."""
        return torch.stack([risks.mean() for risks in self.by_domain(self.sample_risks())])

    def scalars(self, objective: Tensor, **parts: Tensor) -> dict[str, Tensor]:
        """Returns "loss", the objective with the model's own losses, then the parts of both."""
        return {"loss": objective + self.own_loss, **parts, **self.parts}


class Algorithm(nn.Module, ABC):
    """A training method.

    A module, so that what a method carries from step to step (buffers, discriminators) is in its `state_dict` and a
    resumed run goes on with it; what is no tensor, an optimizer's state say, goes through `get_extra_state`.

    Methods differ in `objective`. Those with inner loops or a second optimizer (Fish, MLDG, DANN, CDANN) replace
    `update`. Every forward pass adds the model's own losses, computed on that pass; where a step makes several passes,
    their mean counts.

    Class attributes:
        HPARAMS: The method's hyper-parameters and their defaults, beside those of the benchmark; DomainBed's names.
        RANGES: Values that they may have, where that is not every number that is at least 0.
        SEARCH: Ranges from which a random search draws them, DomainBed's.
        SEARCH_ALIASES: Names under which DomainBed draws hyper-parameters that it calls otherwise for this method.
        MIN_DOMAINS: Fewest training domains that the method is defined for.
        OVERRIDES_LR: Whether the method changes the learning rate itself, which a schedule would undo.
        ACCUMULATES: Whether cutting a step's minibatches into parts leaves a meaning.

    Raises:
        ArgumentError: A hyper-parameter is outside its range.
        ProtocolError: There are too few training domains.
    """

    HPARAMS: ClassVar[Mapping[str, float]] = MappingProxyType({})
    RANGES: ClassVar[Mapping[str, Range]] = MappingProxyType({})
    SEARCH: ClassVar[Mapping[str, Draw]] = MappingProxyType({})
    SEARCH_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    MIN_DOMAINS: ClassVar[int] = 1
    OVERRIDES_LR: ClassVar[bool] = False
    ACCUMULATES: ClassVar[bool] = True

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        if setup.num_domains < self.MIN_DOMAINS:
            name = type(self).__name__
            raise ProtocolError.of(
                "algorithm", name, f"needs {self.MIN_DOMAINS} training domains and was given {setup.num_domains}"
            )
        self.num_domains = setup.num_domains
        self.num_classes = setup.num_classes
        self.hparams = {**self.HPARAMS, **setup.hparams}
        check_ranges(self.hparams, self.RANGES)
        self.aux_coef = setup.aux_coef
        self.specialization_coefs = {"cka_loss": setup.cka_coef, "supcon_loss": setup.supcon_coef}
        self.supcon_temperature = setup.supcon_temperature

    @abstractmethod
    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Computes what is to be minimised.

        Args:
            context: Its model maps images (B, 3, H, W) to logits (B, num_classes).
            minibatches: Images and targets of each training domain.

        Returns:
            Scalars: "loss", which is minimised, and its parts for the records.
        """

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
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
            with _synchronised(context.model, last=position == len(parts)):
                losses = self.objective(context, part)
                context.backward(losses["loss"] / len(parts))
            scalars.append({name: value.detach() for name, value in losses.items()})
        self.share_gradients(context)
        context.optimizer.step()
        return mean_scalars(scalars)

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
        aux_loss = auxiliary_loss(model)
        special = moge_losses(model, targets, self.supcon_temperature)
        own_loss = self.aux_coef * aux_loss
        for name, loss in special.items():
            own_loss = own_loss + self.specialization_coefs[name] * loss
        sizes = [len(minibatch[1]) for minibatch in minibatches]
        return ForwardPass(logits, targets, sizes, own_loss, {"aux_loss": aux_loss, **special})


def full_precision(values: Tensor) -> Tensor:
    """Lifts half-precision values, as autocast gives them, to float32; statistics of them need it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def mean_scalars(scalars: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Averages scalars of the same names over passes or parts of a step."""
    return {name: torch.stack([values[name] for values in scalars]).mean() for name in scalars[0]}


def restart(optimizer: Optimizer) -> None:
    """Forgets an optimizer's moments, also through a launcher's wrapper; rates and groups stay."""
    optimizer.state.clear()


def _synchronised(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Lets a distributed model exchange gradients in the last part of a step only."""
    no_sync: Any = getattr(model, "no_sync", nullcontext)
    return nullcontext() if last else no_sync()
