"""V-REx: risk extrapolation by the variance of risks (Krueger et al., ICML 2021)."""

from types import MappingProxyType

from torch import Tensor

from ..losses import vrex_penalty
from .annealed import Annealed
from .base import Minibatches, StepContext


class VREx(Annealed):
    """mean_e R_e + lambda * Var_e R_e, over training domains e, the variance divided by their number.

    The penalty weighs 1 before step `vrex_penalty_anneal_iters` and `vrex_lambda` from it on; there the optimizer
    starts afresh, as in the reference; the paper takes the sum of risks. Risks are means over all processes.
    """

    ANNEAL = "vrex_penalty_anneal_iters"
    MIN_DOMAINS = 2
    HPARAMS = MappingProxyType({"vrex_lambda": 10.0, "vrex_penalty_anneal_iters": 500})
    SEARCH = MappingProxyType(
        {
            "vrex_lambda": lambda random: 10 ** random.uniform(-1, 5),
            "vrex_penalty_anneal_iters": lambda random: int(10 ** random.uniform(0, 4)),
        }
    )

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        risks = context.mean_keeping_gradient(out.risks())
        task_loss, penalty = risks.mean(), vrex_penalty(risks)
        weight = self.hparams["vrex_lambda"] if self.annealed else 1.0
        return out.scalars(task_loss + weight * penalty, task_loss=task_loss, penalty=penalty)
