"""Methods that match distributions across domains: of features (CORAL, MMD) or of gradients (Fishr)."""

from collections.abc import Callable
from itertools import combinations
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import Algorithm, Minibatches, Setup, StepContext, classifier_of, mean_scalars, tap_features
from .hparams import SHARE, log_uniform
from .penalties import classifier_gradient_variance, coral_distance, mmd_distance
from .risks import Annealed


class Alignment(Algorithm):
    """mean_e R_e + gamma * mean over pairs of domains of a distance between their features.

    Features are the classifier's inputs. Each domain has its own forward pass, as in the reference. With several
    processes, each compares the features of its own images.
    """

    distance: Callable[[Tensor, Tensor], Tensor]  # between the features (B, D) of two domains, a scalar
    MIN_DOMAINS = 2
    COMPARES_IMAGES = True
    HPARAMS = MappingProxyType({"mmd_gamma": 1.0})
    SEARCH = MappingProxyType({"mmd_gamma": log_uniform(-1, 1)})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._features = tap_features(setup.network, type(self).__name__)

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and those of the model."""
        scalars, features = [], []
        for minibatch in minibatches:
            out = self.forward_domains(context.model, [minibatch])
            features.append(self._features.take())
            task_loss = F.cross_entropy(out.logits, out.targets)
            scalars.append(out.scalars(task_loss, task_loss=task_loss))
        penalty = torch.stack([self.distance(x, y) for x, y in combinations(features, 2)]).mean()
        losses = mean_scalars(scalars)
        return {**losses, "loss": losses["loss"] + self.hparams["mmd_gamma"] * penalty, "penalty": penalty}


class CORAL(Alignment):
    """Distance of means and covariances (Sun and Saenko, 2016, arXiv:1607.01719).

    The paper compares covariances of one layer's logits. The reference compares means too, and takes features.
    """

    distance = staticmethod(coral_distance)


class MMD(Alignment):
    """Maximum mean discrepancy with Gaussian kernels (Li et al., CVPR 2018), without that paper's adversary."""

    distance = staticmethod(mmd_distance)


class Fishr(Annealed):
    """CE + lambda * mean over domains and classifier parameters of (v_e - mean_e v_e)^2.

    Matches the variances of gradients (Rame et al., ICML 2022, arXiv:2109.02934). v_e is the variance, over a domain's
    images, of the gradient with respect to the linear classifier, smoothed over steps: v_e <- ema v_e + (1 - ema)
    Var_e, from 0. In the penalty it is divided by 1 - ema, which makes its gradient independent of ema. Before step
    `penalty_anneal_iters` the penalty weighs 0, and at that step the optimizer is reset. All this is as in the
    reference; the paper's penalty sums over parameters. With several processes, Var_e is the mean of the variances
    within each process.

    If a step has some of the domains, only their averages move, and the penalty compares these. Averages start at 0
    and are small at first, so that domains which were drawn less often differ by that as well.
    """

    ANNEAL = "penalty_anneal_iters"
    MIN_DOMAINS = 2
    ACCUMULATES = False  # each part of a step would move the averages
    COMPARES_IMAGES = True
    HPARAMS = MappingProxyType({"lambda": 1000.0, "penalty_anneal_iters": 1500, "ema": 0.95})
    RANGES = MappingProxyType({"ema": SHARE})
    SEARCH = MappingProxyType(
        {
            "lambda": log_uniform(1.0, 4.0),
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
        """Moves the averages and returns "loss" and its parts "task_loss", "penalty" and those of the model."""
        out = self.forward_domains(context.model, minibatches)
        columns = (self._features.take(), out.logits, out.targets)
        domains = zip(*(out.by_domain(column) for column in columns), strict=True)
        new = torch.stack([classifier_gradient_variance(z, p, y, bias=self._bias) for z, p, y in domains])
        ema = self.hparams["ema"]
        present = self.present_rows(context)
        smooth = ema * self.variances[present] + (1 - ema) * context.mean_keeping_gradient(new)
        self.variances[present] = smooth.detach().to(self.variances.dtype)
        smooth = smooth / (1 - ema)
        task_loss, penalty = F.cross_entropy(out.logits, out.targets), (smooth - smooth.mean(0)).square().mean()
        weight = self.hparams["lambda"] if self.annealed else 0.0
        return out.scalars(task_loss + weight * penalty, task_loss=task_loss, penalty=penalty)
