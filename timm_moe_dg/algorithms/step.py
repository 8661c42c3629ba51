"""One step of training: what it is taken with, and what a forward pass in it gave."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

# Of one training domain: images (B, 3, H, W), targets (B,), and metadata for models that take them
Minibatch = tuple[Tensor, ...]
Minibatches = Sequence[Minibatch]


@dataclass(frozen=True)
class StepContext:
    """What a step is taken with.

    Attributes:
        model: The network as the launcher wrapped it; forward passes go through it, once or several times a step.
        optimizer: Steps the network's parameters and those of `Algorithm.parameter_groups`.
        backward: Computes gradients of a loss, scaled or synchronized as the run needs.
        reduce: Mean of a tensor over processes.
        grad_accum_steps: Parts that a step's minibatches are cut into, to save memory.
        autocast: Context of the run's mixed precision, for networks that the launcher did not wrap.
        domains: Which of the training domains the step's minibatches come from, as positions among them; None where
            every step has all of them, in order.
    """

    model: nn.Module
    optimizer: Optimizer
    backward: Callable[[Tensor], None] = Tensor.backward
    reduce: Callable[[Tensor], Tensor] = lambda value: value
    grad_accum_steps: int = 1
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    domains: Sequence[int] | None = None

    def mean_keeping_gradient(self, value: Tensor) -> Tensor:
        """Mean of a statistic over processes, through which this process's own gradient flows.

        The launcher averages gradients over processes, which makes the gradient of a function of the mean exact.
        """
        return value + (self.reduce(value.detach()) - value.detach())

    def synchronized(self, *, last: bool) -> AbstractContextManager[object]:
        """Lets a distributed model exchange gradients in the last part of a step only."""
        return nullcontext() if last else getattr(self.model, "no_sync", nullcontext)()


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


def full_precision(values: Tensor) -> Tensor:
    """Lifts half-precision values, as autocast gives them, to float32; statistics of them need it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def detached(scalars: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Lets go of the graph behind scalars."""
    return {name: value.detach() for name, value in scalars.items()}


def mean_scalars(scalars: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Averages scalars of the same names over passes or parts of a step."""
    return {name: torch.stack([values[name] for values in scalars]).mean() for name in scalars[0]}


def cut_to_smaller(first: Minibatch, second: Minibatch) -> tuple[Minibatch, Minibatch]:
    """Cuts the larger of two minibatches to the size of the smaller, for methods that take domains in pairs."""
    size = min(len(first[1]), len(second[1]))
    return tuple(column[:size] for column in first), tuple(column[:size] for column in second)
