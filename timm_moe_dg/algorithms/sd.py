"""Spectral decoupling (Pezeshki et al., Gradient starvation, NeurIPS 2021)."""

from types import MappingProxyType

from torch import Tensor
from torch.nn import functional as F

from ..losses import spectral_decoupling
from .base import Algorithm, Minibatches, StepContext


class SD(Algorithm):
    """CE + sd_reg * mean(logits^2), over the concatenated minibatches.

    The reference takes the mean over all entries of the logits; the paper writes half the squared norm per image.
    """

    HPARAMS = MappingProxyType({"sd_reg": 0.1})
    SEARCH = MappingProxyType({"sd_reg": lambda random: 10 ** random.uniform(-5, -1)})

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        task_loss, penalty = F.cross_entropy(out.logits, out.targets), spectral_decoupling(out.logits)
        return out.scalars(task_loss + self.hparams["sd_reg"] * penalty, task_loss=task_loss, penalty=penalty)
