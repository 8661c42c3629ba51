"""Invariant risk minimisation (Arjovsky et al., 2019)."""

from types import MappingProxyType

import torch
from torch import Tensor

from ..losses import irm_penalty
from .annealed import Annealed
from .base import Minibatches, StepContext


class IRM(Annealed):
    """mean_e R_e + lambda * mean_e grad_w R_e(w * logits)^2 at w = 1, over training domains e.

    The square is the product of the gradients on the even and on the odd images of the domain. The penalty weighs 1
    before step `irm_penalty_anneal_iters` and `irm_lambda` from it on; there the optimizer starts afresh. As the
    reference does it; the paper instead divides the whole loss by lambda. Under several processes each takes the
    penalty on its own images.
    """

    ANNEAL = "irm_penalty_anneal_iters"
    HPARAMS = MappingProxyType({"irm_lambda": 100.0, "irm_penalty_anneal_iters": 500})
    SEARCH = MappingProxyType(
        {
            "irm_lambda": lambda random: 10 ** random.uniform(-1, 5),
            "irm_penalty_anneal_iters": lambda random: int(10 ** random.uniform(0, 4)),
        }
    )

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        domains = zip(out.by_domain(out.logits), out.by_domain(out.targets), strict=True)
        penalty = torch.stack([irm_penalty(logits, targets) for logits, targets in domains]).mean()
        task_loss = out.risks().mean()
        weight = self.hparams["irm_lambda"] if self.annealed else 1.0
        return out.scalars(task_loss + weight * penalty, task_loss=task_loss, penalty=penalty)
