"""Training methods: a step's inputs and forward passes, the base class of methods, ERM, and taps of features.

A method has an objective over one minibatch per training domain, and a step that minimizes the objective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from operator import add
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..errors import ArgumentError, ProtocolError
from ..layers import LossWeights, after_step
from ..layers.parameters import upcast
from ..layers.text_head import TextHead
from ..losses import reported_losses
from .hparams import Distribution, Tunable

ParameterGroup = dict[str, Any]  # "params" and an optimizer's options, as torch has it
# One training domain: images (B, 3, H, W), targets (B,), and metadata for models that take them
Minibatch = tuple[Tensor, ...]
Minibatches = Sequence[Minibatch]


@dataclass(frozen=True)
class StepContext:
    """The model, its optimizer and the run's settings in a step."""

    model: nn.Module  # as the launcher wrapped it; every forward pass goes through it
    optimizer: Optimizer  # of the network and of `Algorithm.parameter_groups`
    _: KW_ONLY
    backward: Callable[[Tensor], None] = Tensor.backward  # scaled or synchronized as the run needs
    reduce: Callable[[Tensor], Tensor] = lambda value: value  # mean over processes
    grad_accum_steps: int = 1  # parts of a step's minibatches
    step_targets: Tensor | None = None  # of all parts, on this process, where the objective gets one part
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # for networks that are not wrapped
    domains: Sequence[int] | None = None  # positions among the training domains; None for all, in order

    def mean_keeping_gradient(self, value: Tensor) -> Tensor:
        """Averages a statistic over processes and keeps this process's gradient."""
        # The launcher averages gradients over processes, which makes the gradient of a function of the mean exact
        return value + (self.reduce(value.detach()) - value.detach())

    def mean_weight(self, weights: Tensor, targets: Tensor) -> Tensor:
        """Returns the sum of the weights (C, ...) of images by class, as a mean over the step's parts and processes.

        A sum over images, divided by this instead of the part's own weight, is exact however a step is divided.
        """
        parts = 1 if self.step_targets is None else self.grad_accum_steps
        return self.reduce(weights[targets if self.step_targets is None else self.step_targets].sum(0) / parts)


@dataclass(frozen=True)
class ForwardPass:
    """Result of a forward pass over the images of one or more domains."""

    logits: Tensor  # (N, num_classes), float32 or better
    targets: Tensor  # (N,)
    sizes: Sequence[int]  # number of images of each domain, in the order of the minibatches, N in all
    _: KW_ONLY
    model_loss: Tensor  # weighted sum of the losses that the network reports
    parts: Mapping[str, Tensor]  # the same losses by name, not weighted

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
        """Returns "loss", the objective plus the losses of the model, then the parts of both."""
        return {"loss": objective + self.model_loss, **parts, **self.parts}


def detached(scalars: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detaches scalars from their graph."""
    return {name: value.detach() for name, value in scalars.items()}


def mean_scalars(scalars: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Averages scalars of the same names over passes or parts of a step."""
    return {name: torch.stack([values[name] for values in scalars]).mean() for name in scalars[0]}


def cut_to_smaller(first: Minibatch, second: Minibatch) -> tuple[Minibatch, Minibatch]:
    """Cuts the larger of two minibatches to the size of the smaller, for methods that take domains in pairs."""
    size = min(len(first[1]), len(second[1]))
    return tuple(column[:size] for column in first), tuple(column[:size] for column in second)


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
    class_weights: Tensor | None = None  # (C,), if `task_loss` is a mean that is weighted by them
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
        NEEDS_PIXELS: Whether the method changes images, so that a network cannot start at the outputs of its trunk.
        COMPARES_IMAGES: Whether the loss compares the images of one process, and so depends on their number.

    >>> class WorstDomain(timm_moe_dg.algorithms.Algorithm):
    ...     def objective(self, context, minibatches):
    ...         out = self.forward_domains(context.model, minibatches)
    ...         return out.scalars(out.risks().max(), task_loss=out.risks().mean())
    """

    SEARCH: ClassVar[Mapping[str, Distribution | str]] = MappingProxyType({})
    SEARCH_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    MIN_DOMAINS: ClassVar[int] = 1
    OVERRIDES_LR: ClassVar[bool] = False
    TAKES_TASK_LOSS: ClassVar[bool] = False
    TAKES_LINEAR_STEPS: ClassVar[bool] = True
    ACCUMULATES: ClassVar[bool] = True
    NEEDS_PIXELS: ClassVar[bool] = False
    COMPARES_IMAGES: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup.hparams)
        if setup.step_domains < self.MIN_DOMAINS:
            remedy = f"needs {self.MIN_DOMAINS} training domains and was given {setup.step_domains}"
            raise ProtocolError.of("algorithm", type(self).__name__, remedy)
        self.num_domains = setup.num_domains
        self.num_classes = setup.num_classes
        self.loss_weights = setup.loss_weights
        self.task_loss, self.class_weights = setup.task_loss, setup.class_weights

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
        # Steps are skipped by the scaling of float16 gradients
        buffers = self.buffers() if getattr(context.optimizer, "scaler", None) else ()
        before = {buffer: buffer.clone() for buffer in buffers if buffer.is_floating_point()}
        scalars = self.update(context, minibatches)
        is_skipped = getattr(context.optimizer, "step_was_skipped", False)
        for buffer, value in before.items() if is_skipped else ():
            buffer.copy_(value)
        after_step(context.model, moves=self.trains_network and not is_skipped)
        return scalars

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Updates the weights. Returns the objective's scalars, detached, the mean over an accumulated step's parts."""
        parts = self.chunk(minibatches, context.grad_accum_steps)
        if len(parts) > 1:
            context = replace(context, step_targets=torch.cat([targets for _, targets, *_ in minibatches]))
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
        logits = upcast(model(images, *metadata))  # from the type of autocast
        sizes = [len(minibatch[1]) for minibatch in minibatches]
        losses = reported_losses(model, targets, self.loss_weights, sizes)
        model_loss = reduce(add, (loss.weight * loss.value for loss in losses.values()))
        parts = {name: loss.value for name, loss in losses.items()}
        return ForwardPass(logits, targets, sizes, model_loss=model_loss, parts=parts)


class ERM(Algorithm):
    """Mean cross-entropy over the images of all domains, plus the routers' auxiliary loss and MoGE's own losses.

    Empirical risk minimization (Vapnik, 1998).
    """

    TAKES_TASK_LOSS = True

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss", the weighted sum of "task_loss", "aux_loss" and MoGE's "cka_loss" and "supcon_loss"."""
        out = self.forward_domains(context.model, minibatches)
        task_loss = self.task_loss(out.logits, out.targets)
        if (weights := self.class_weights) is not None:
            # Divided by the weights of the whole step instead of those of a part's own images
            task_loss = task_loss * (weights[out.targets].sum() / context.mean_weight(weights, out.targets))
        return out.scalars(task_loss, task_loss=task_loss)


class Tap:
    """Stores one tensor of the last forward pass of a network in training mode, or of a `frozen` one in any mode."""

    def __init__(self, network: nn.Module, *, frozen: bool = False) -> None:
        self._network = network
        self._frozen = frozen
        self._stored: Tensor | None = None

    # Evaluations, also those of an averaged copy of the network, must store nothing
    def store(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None = None) -> None:
        """Forward hook: stores the module's output. As a pre-hook: stores its first input."""
        if self._network.training or self._frozen:
            self._stored = inputs[0] if output is None else output

    def take(self) -> Tensor:
        """Returns the stored tensor in float32 or better, and clears it."""
        if self._stored is None:
            raise ArgumentError.of("model", None, "no forward pass in training mode went through the tapped module")
        stored, self._stored = self._stored, None
        return upcast(stored)


def classifier_of(network: nn.Module, method: str) -> nn.Linear:
    """Returns the last layer of a timm model. Anything but one linear layer is an `ArgumentError`."""
    classifier = getattr(network, "get_classifier", lambda: None)()
    if not isinstance(classifier, nn.Linear):
        remedy = f"{method} needs a linear classifier and this is {type(classifier).__name__}; take another model"
        raise ArgumentError.of("model", type(network).__name__, remedy)
    return classifier


def tap_features(network: nn.Module, method: str) -> Tap:
    """Taps the inputs of a linear classifier or of a text head, (B, D)."""
    tap, classifier = Tap(network), getattr(network, "get_classifier", lambda: None)()
    if not isinstance(classifier, TextHead):
        classifier = classifier_of(network, method)
    classifier.register_forward_pre_hook(tap.store)
    return tap
