"""Fishr: variances of gradients alike in all domains (Rame et al., ICML 2022)."""

from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import classifier_gradient_variance, fishr_penalty
from .annealed import Annealed
from .base import Minibatches, Setup, StepContext
from .ranges import SHARE
from .taps import classifier_of, tap_features


class Fishr(Annealed):
    """CE + lambda * mean over domains and classifier parameters of (v_e - mean_e v_e)^2.

    v_e is the variance, over a domain's images, of the gradient with respect to the linear classifier, smoothed over
    steps: v_e <- ema v_e + (1 - ema) Var_e, from 0. It is divided by 1 - ema, so that what flows back does not depend
    on ema, and collected from the first step on. The penalty weighs 0 before step `penalty_anneal_iters`, where the
    optimizer starts afresh. As the reference; the paper's penalty sums over parameters. Variances are those within
    each process's images, averaged over processes.
    """

    ANNEAL = "penalty_anneal_iters"
    MIN_DOMAINS = 2
    ACCUMULATES = False  # each part of a step would move the averages
    HPARAMS = MappingProxyType({"lambda": 1000.0, "penalty_anneal_iters": 1500, "ema": 0.95})
    RANGES = MappingProxyType({"ema": SHARE})
    SEARCH = MappingProxyType(
        {
            "lambda": lambda random: 10 ** random.uniform(1.0, 4.0),
            "penalty_anneal_iters": lambda random: int(random.uniform(0.0, 5000.0)),
            "ema": lambda random: random.uniform(0.90, 0.99),
        }
    )
    variances: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        classifier = classifier_of(setup.network, "Fishr")
        self._bias = classifier.bias is not None
        self._features = tap_features(setup.network, "Fishr")
        size = sum(parameter.numel() for parameter in classifier.parameters())
        self.register_buffer("variances", torch.zeros(setup.num_domains, size))

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Moves the averages and returns "loss" and its parts "task_loss", "penalty" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        columns = (self._features.take(), out.logits, out.targets)
        domains = zip(*(out.by_domain(column) for column in columns), strict=True)
        new = torch.stack([classifier_gradient_variance(z, p, y, bias=self._bias) for z, p, y in domains])
        ema = self.hparams["ema"]
        smooth = ema * self.variances + (1 - ema) * context.mean_keeping_gradient(new)
        self.variances.copy_(smooth.detach())
        task_loss, penalty = F.cross_entropy(out.logits, out.targets), fishr_penalty(smooth / (1 - ema))
        weight = self.hparams["lambda"] if self.annealed else 0.0
        return out.scalars(task_loss + weight * penalty, task_loss=task_loss, penalty=penalty)
