"""Inputs of a training step and results of its forward passes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

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
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext  # for networks that are not wrapped
    domains: Sequence[int] | None = None  # positions among the training domains; None for all, in order

    def mean_keeping_gradient(self, value: Tensor) -> Tensor:
        """Averages a statistic over processes and keeps this process's gradient."""
        # The launcher averages gradients over processes, which makes the gradient of a function of the mean exact
        return value + (self.reduce(value.detach()) - value.detach())


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


def full_precision(values: Tensor) -> Tensor:
    """Converts half-precision values, as autocast returns them, to float32."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


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
