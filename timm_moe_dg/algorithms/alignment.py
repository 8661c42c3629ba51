"""CORAL and MMD: features of all domains are distributed alike."""

from abc import abstractmethod
from itertools import combinations
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..losses import coral_distance, mmd_distance
from .base import Algorithm, Minibatches, Setup, StepContext, mean_scalars
from .taps import tap_features


class Alignment(Algorithm):
    """mean_e R_e + gamma * mean over pairs of domains of a distance between their features.

    Features are what the classifier is given. Each domain has a forward pass of its own, as in the reference. Under
    several processes each compares the features of its own images.
    """

    MIN_DOMAINS = 2
    HPARAMS = MappingProxyType({"mmd_gamma": 1.0})
    SEARCH = MappingProxyType({"mmd_gamma": lambda random: 10 ** random.uniform(-1, 1)})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._features = tap_features(setup.network, type(self).__name__)

    @abstractmethod
    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Compares the features (B, D) of two domains; a scalar."""

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and the model's own."""
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
    """Means and covariances alike (Sun and Saenko, Deep CORAL, 2016).

    The paper compares covariances only, in one layer's logits; the reference adds the means, and takes features.
    """

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared differences of means and covariances; see `losses.coral_distance`."""
        return coral_distance(x, y)


class MMD(Alignment):
    """Maximum mean discrepancy with Gaussian kernels (Li et al., CVPR 2018), without that paper's adversary."""

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Squared discrepancy over seven kernels; see `losses.mmd_distance`."""
        return mmd_distance(x, y)
