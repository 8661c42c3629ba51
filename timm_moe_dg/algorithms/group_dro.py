"""Group distributionally robust optimisation (Sagawa et al., ICLR 2020)."""

from types import MappingProxyType

import torch
from torch import Tensor

from ..losses import group_weights
from .base import Algorithm, Minibatches, Setup, StepContext


class GroupDRO(Algorithm):
    """sum_e q_e R_e with q_e <- q_e exp(eta R_e) / sum: the domains' weights rise with their risks.

    The weights that a step's risks lead to weigh the same step (paper, algorithm 1). They start at ones and have sum 1
    after the first step, so the first step starts from equal weights. Risks are means over all processes, so the
    weights stay equal on all. The reference makes one forward pass per domain, this one pass over all images.
    """

    MIN_DOMAINS = 2
    ACCUMULATES = False  # each part of a step would move the weights
    HPARAMS = MappingProxyType({"groupdro_eta": 0.01})
    SEARCH = MappingProxyType({"groupdro_eta": lambda random: 10 ** random.uniform(-3, -1)})
    weights: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.register_buffer("weights", torch.ones(setup.num_domains))

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Moves the weights and returns "loss" and its parts: "task_loss", "worst_risk" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        risks = context.mean_keeping_gradient(out.risks())
        self.weights.copy_(group_weights(self.weights, risks, self.hparams["groupdro_eta"]))
        objective = (self.weights * risks).sum()
        return out.scalars(objective, task_loss=objective, worst_risk=risks.max())
