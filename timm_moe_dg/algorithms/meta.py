"""Meta-learning methods with inner-loop updates: Fish and MLDG."""

from collections.abc import Sequence
from itertools import cycle
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim import Adam

from ..errors import ArgumentError, ProtocolError
from .base import ERM, Minibatch, Minibatches, Setup, StepContext, cut_to_smaller, detached, mean_scalars
from .hparams import log_uniform

_ADAM = ("params", "lr", "weight_decay")  # of the run's optimizer, which the inner steps of MLDG take over


class Fish(ERM):
    """w <- w + meta_lr * (w' - w), where w' comes from w by one optimizer step on each domain in turn.

    Matches the gradients of the domains to first order (Shi et al., ICLR 2022, arXiv:2104.09937, algorithm 1).

    The run's optimizer takes the inner steps, on the network in place, and keeps its moments from step to step, as
    the reference's inner Adam does. Floating-point buffers, such as running statistics, are interpolated like weights.
    Integer buffers, such as counters of batches, keep the values of the inner steps. The domains keep their order. The
    paper permutes them.
    """

    MIN_DOMAINS = 2
    ACCUMULATES = False
    HPARAMS = MappingProxyType({"meta_lr": 0.5})
    SEARCH = MappingProxyType({"meta_lr": lambda random: float(random.choice([0.05, 0.1, 0.5]))})

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Takes the inner steps, then interpolates."""
        self.chunk(minibatches, context.grad_accum_steps)  # refuses accumulation
        state = [*context.model.parameters(), *context.model.buffers()]
        outer = [value.detach().clone() for value in state]
        scalars = []
        for minibatch in minibatches:
            losses = self.objective(context, [minibatch])
            context.optimizer.zero_grad()
            context.backward(losses["loss"])
            context.optimizer.step()
            scalars.append(detached(losses))
        with torch.no_grad():
            for inner, start in zip(state, outer, strict=True):
                if inner.is_floating_point():
                    moved = start.lerp(inner, self.hparams["meta_lr"])
                    inner.copy_(torch.where(inner == start, inner, moved))  # avoids inf - inf, which is NaN
        return mean_scalars(scalars)


class MLDG(ERM):
    """grad R_i(w) + beta * grad R_j(w'), with w' one Adam step from w on R_i: a step on domain i should help domain j.

    Meta-learning for domain generalization (Li et al., AAAI 2018, arXiv:1710.03463). A random `n_meta_test` of the
    domains are the j. Every other domain i is paired with one of them in turn, and the larger minibatch of a pair is
    cut to the smaller. The sum over pairs is divided by the number of all domains. As in the reference, gradients are
    first order (the paper differentiates through the inner step), and each pair's inner step has a new Adam with the
    run's learning rate and weight decay. The inner steps change the network in place, so running statistics are updated
    by every pass; the reference's are not.
    """

    MIN_DOMAINS = 2
    TAKES_LINEAR_STEPS = False  # its inner steps move all weights
    ACCUMULATES = False
    HPARAMS = MappingProxyType({"mldg_beta": 1.0, "n_meta_test": 2})
    SEARCH = MappingProxyType(
        {"mldg_beta": log_uniform(-1, 1), "n_meta_test": lambda random: int(random.choice([1, 2]))}
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if self.hparams["n_meta_test"] >= setup.step_domains:
            remedy = f"must be less than the number of training domains, {setup.step_domains}; set it in --hparams"
            raise ProtocolError.of("n_meta_test", self.hparams["n_meta_test"], remedy)

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Adds up the gradients of all pairs, then takes a step. Scaled gradients (float16) are an `ArgumentError`."""
        if getattr(context.optimizer, "scaler", None) is not None:
            raise ArgumentError.of("amp_dtype", "float16", "MLDG adds up gradients itself; take bfloat16 or none")
        self.chunk(minibatches, context.grad_accum_steps)  # refuses accumulation
        groups = context.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        beta = float(self.hparams["mldg_beta"])
        scalars = []
        for inner, outer in self._pairs(context, minibatches):
            start = [parameter.detach().clone() for parameter in parameters]
            losses = self._add_gradients(context, inner, parameters, totals, 1.0)
            Adam([{name: group[name] for name in _ADAM if name in group} for group in groups]).step()
            ahead = self._add_gradients(context, outer, parameters, totals, beta)
            with torch.no_grad():
                for parameter, value in zip(parameters, start, strict=True):
                    parameter.copy_(value)
            scalars.append({**losses, "loss": losses["loss"] + beta * ahead["loss"], "meta_loss": ahead["task_loss"]})
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / len(minibatches)
        context.optimizer.step()
        return mean_scalars(scalars)

    def _pairs(self, context: StepContext, minibatches: Minibatches) -> list[tuple[Minibatch, Minibatch]]:
        """Pairs every domain of a random split with one of the `n_meta_test` others in turn, cut to one size."""
        held_out = int(self.hparams["n_meta_test"])
        # Averaged over processes, the random numbers give the same order on all
        order = context.reduce(torch.rand(len(minibatches), device=minibatches[0][1].device)).argsort().tolist()
        pairs = zip(order[:-held_out], cycle(order[-held_out:]), strict=False)
        return [cut_to_smaller(minibatches[inner], minibatches[outer]) for inner, outer in pairs]

    def _add_gradients(
        self,
        context: StepContext,
        minibatch: Minibatch,
        parameters: Sequence[nn.Parameter],
        totals: Sequence[Tensor],
        weight: float,
    ) -> dict[str, Tensor]:
        """Adds one domain's weighted gradients to the totals; leaves them in `grad` too."""
        context.optimizer.zero_grad()
        losses = self.objective(context, [minibatch])
        context.backward(losses["loss"])
        for parameter, total in zip(parameters, totals, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad, alpha=weight)
        return detached(losses)
