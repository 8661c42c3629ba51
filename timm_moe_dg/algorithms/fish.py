"""Fish: gradients of the domains matched to first order (Shi et al., ICLR 2022)."""

from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Algorithm, Minibatches, StepContext, mean_scalars


class Fish(Algorithm):
    """w <- w + meta_lr * (w' - w), where w' comes from w by one optimizer step on each domain in turn (algorithm 1).

    The run's optimizer takes the inner steps, on the network in place, and keeps its moments from step to step, as
    the reference's inner Adam does. The outer weights move by interpolation only; buffers such as running statistics
    are interpolated too, counters are not; what did not change stays as it is, infinite or not. The domains keep their
    order; the paper permutes them.
    """

    MIN_DOMAINS = 2
    ACCUMULATES = False
    HPARAMS = MappingProxyType({"meta_lr": 0.5})
    SEARCH = MappingProxyType({"meta_lr": lambda random: float(random.choice([0.05, 0.1, 0.5]))})

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" of an inner step and its parts "task_loss" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        task_loss = F.cross_entropy(out.logits, out.targets)
        return out.scalars(task_loss, task_loss=task_loss)

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Takes the inner steps, then moves part of the way."""
        self.chunk(minibatches, context.grad_accum_steps)
        state = [*context.model.parameters(), *context.model.buffers()]
        outer = [value.detach().clone() for value in state]
        scalars = []
        for minibatch in minibatches:
            losses = self.objective(context, [minibatch])
            context.optimizer.zero_grad()
            context.backward(losses["loss"])
            context.optimizer.step()
            scalars.append({name: value.detach() for name, value in losses.items()})
        with torch.no_grad():
            for inner, start in zip(state, outer, strict=True):
                if inner.is_floating_point():
                    moved = start.lerp(inner, self.hparams["meta_lr"])
                    inner.copy_(torch.where(inner == start, inner, moved))  # between infinities there is no number
        return mean_scalars(scalars)
