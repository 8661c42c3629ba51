"""Methods whose penalty takes its full weight only from a certain step on, at which Adam starts afresh."""

from typing import ClassVar

import torch
from torch import Tensor

from .base import Algorithm, Minibatches, Setup, StepContext, restart


class Annealed(Algorithm):
    """Counts steps, and forgets the optimizer's moments right before the first step with the full penalty.

    Class attributes:
        ANNEAL: Name of the hyper-parameter that holds the number of steps before the full penalty.
    """

    ANNEAL: ClassVar[str]
    step: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    @property
    def annealed(self) -> bool:
        """Whether the penalty has its full weight."""
        return bool(self.step >= self.hparams[self.ANNEAL])

    def restart(self, context: StepContext) -> None:
        """Starts the optimizer afresh: its moments belong to gradients of another magnitude."""
        restart(context.optimizer)

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Takes one step, the one at which the penalty sets in with a fresh optimizer."""
        if self.step == self.hparams[self.ANNEAL]:
            self.restart(context)
        losses = super().update(context, minibatches)
        self.step += 1
        return losses
