"""Empirical risk minimization (Vapnik, 1998), which pools the domains."""

from torch import Tensor

from .base import Algorithm
from .step import Minibatches, StepContext


class ERM(Algorithm):
    """Mean cross-entropy over the images of all domains, plus the routers' auxiliary loss and MoGE's own losses.

    Empirical risk minimization (Vapnik, 1998).
    """

    TAKES_TASK_LOSS = True

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss", the weighted sum of "task_loss", "aux_loss" and MoGE's "cka_loss" and "supcon_loss"."""
        out = self.forward_domains(context.model, minibatches)
        task_loss = self.task_loss(out.logits, out.targets)
        return out.scalars(task_loss, task_loss=task_loss)
