"""RDM: distributions of risks matched between domains (Nguyen et al., WACV 2024)."""

from types import MappingProxyType

from torch import Tensor

from ..losses import rdm_penalties
from .annealed import Annealed
from .base import Minibatches, StepContext


class RDM(Annealed):
    """mean_e R_e + lambda * MMD^2(risks of the worst domain, risks of all) + variance_weight * (their variances).

    Risks are those of single images, the worst domain has the largest mean. Both penalties weigh 0 before step
    `rdm_penalty_anneal_iters`; there the optimizer starts afresh at the rate `rdm_lr`, which it keeps: a run whose rate
    a schedule, a warm-up or a decay by layer sets after every step is refused. Under several processes each compares
    the risks of its own images. The reference changes `rdm_lambda`, `variance_weight` and the annealing by data set
    (DomainNet 0.5, 0, 2400; TerraIncognita and OfficeHome variance weight 0): set them.
    """

    ANNEAL = "rdm_penalty_anneal_iters"
    MIN_DOMAINS = 2
    OVERRIDES_LR = True
    HPARAMS = MappingProxyType(
        {"rdm_lambda": 5.0, "rdm_penalty_anneal_iters": 1500, "variance_weight": 0.004, "rdm_lr": 1.5e-5}
    )
    SEARCH = MappingProxyType(
        {
            "rdm_lambda": lambda random: random.uniform(0.1, 10.0),
            "rdm_penalty_anneal_iters": lambda random: int(random.uniform(800, 2700)),
            "variance_weight": lambda random: random.uniform(0.001, 0.007),
            "rdm_lr": lambda random: random.uniform(8e-6, 2e-5),
        }
    )

    def restart(self, context: StepContext) -> None:
        """Starts the optimizer afresh, at another rate."""
        super().restart(context)
        for group in context.optimizer.param_groups:
            group["lr"] = self.hparams["rdm_lr"]

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty", "variance_penalty" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        risks = out.by_domain(out.sample_risks())
        task_loss, (matching, variance) = out.risks().mean(), rdm_penalties(risks)
        penalty = self.hparams["rdm_lambda"] * matching + self.hparams["variance_weight"] * variance
        objective = task_loss + (penalty if self.annealed else 0.0)
        return out.scalars(objective, task_loss=task_loss, penalty=matching, variance_penalty=variance)
