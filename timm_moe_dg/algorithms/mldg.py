"""Meta-learning for domain generalization (Li et al., AAAI 2018)."""

from collections.abc import Sequence
from itertools import cycle
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from ..errors import ArgumentError, ProtocolError
from .base import Algorithm, Minibatches, Setup, StepContext, mean_scalars


class MLDG(Algorithm):
    """grad R_i(w) + beta * grad R_j(w'), w' one Adam step from w on R_i: what helps domain i shall help domain j.

    A random `n_meta_test` of the domains are the j; every other domain i is paired with one of them in turn. The sum
    over pairs is divided by the number of all domains. As the reference: first order (the paper differentiates through
    the inner step), and a fresh Adam, with the run's rate and weight decay, for each pair's inner step. The inner
    steps are taken on the network in place; running statistics, which the reference leaves alone, see every pass.
    """

    MIN_DOMAINS = 2
    ACCUMULATES = False
    HPARAMS = MappingProxyType({"mldg_beta": 1.0, "n_meta_test": 2})
    SEARCH = MappingProxyType(
        {
            "mldg_beta": lambda random: 10 ** random.uniform(-1, 1),
            "n_meta_test": lambda random: int(random.choice([1, 2])),
        }
    )

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if self.hparams["n_meta_test"] >= setup.num_domains:
            remedy = f"must be less than the number of training domains, {setup.num_domains}; set it in --hparams"
            raise ProtocolError.of("n_meta_test", self.hparams["n_meta_test"], remedy)

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" of one domain and its parts "task_loss" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        task_loss = F.cross_entropy(out.logits, out.targets)
        return out.scalars(task_loss, task_loss=task_loss)

    def update(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Gathers the gradients of all pairs, then steps.

        Raises:
            ArgumentError: Gradients are scaled, as float16 needs it, and cannot be added up here.
        """
        if getattr(context.optimizer, "scaler", None) is not None:
            raise ArgumentError.of("amp_dtype", "float16", "MLDG adds up gradients itself; take bfloat16 or none")
        self.chunk(minibatches, context.grad_accum_steps)
        groups = context.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        held_out = int(self.hparams["n_meta_test"])
        # The mean of what processes draw is the same order on all of them
        order = context.reduce(torch.rand(len(minibatches), device=minibatches[0][1].device)).argsort().tolist()
        scalars = []
        for inner, outer in zip(order[:-held_out], cycle(order[-held_out:]), strict=False):
            start = [parameter.detach().clone() for parameter in parameters]
            losses = self._add_gradients(context, minibatches[inner], parameters, totals, 1.0)
            _fresh_adam(groups).step()
            beta = float(self.hparams["mldg_beta"])
            ahead = self._add_gradients(context, minibatches[outer], parameters, totals, beta)
            _restore(parameters, start)
            scalars.append({**losses, "loss": losses["loss"] + beta * ahead["loss"], "meta_loss": ahead["task_loss"]})
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.grad = total / len(minibatches)
        context.optimizer.step()
        return mean_scalars(scalars)

    def _add_gradients(
        self,
        context: StepContext,
        minibatch: tuple[Tensor, ...],
        parameters: Sequence[nn.Parameter],
        totals: Sequence[Tensor],
        weight: float,
    ) -> dict[str, Tensor]:
        """Adds one domain's weighted gradients, where the network stands, to the totals; leaves them in `grad` too."""
        context.optimizer.zero_grad()
        losses = self.objective(context, [minibatch])
        context.backward(losses["loss"])
        for parameter, total in zip(parameters, totals, strict=True):
            if parameter.grad is not None:
                total.add_(parameter.grad, alpha=weight)
        return {name: value.detach() for name, value in losses.items()}


def _fresh_adam(groups: Sequence[dict[str, Any]]) -> Adam:
    """Adam without moments, with the rate and the weight decay of an optimizer's groups."""
    kept = ("params", "lr", "weight_decay")
    return Adam([{name: group[name] for name in kept if name in group} for group in groups])


@torch.no_grad()
def _restore(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
