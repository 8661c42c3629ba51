"""Empirical risk minimisation (Vapnik, 1998): the domains are pooled and their labels ignored."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Algorithm, Minibatches


class ERM(Algorithm):
    """Cross-entropy over the concatenated minibatches, plus the routers' auxiliary loss and, for MoGE, its own losses.

    The mean is over images, so a domain with more images in the step weighs more; it is not the mean of domain means.
    """

    def objective(self, model: nn.Module, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss", the weighted sum of "task_loss", "aux_loss" and MoGE's "cka_loss" and "supcon_loss"."""
        images, targets, *metadata = (torch.cat(column) for column in zip(*minibatches, strict=True))
        logits, aux_loss = self.run(model, images, *metadata)
        task_loss = F.cross_entropy(logits, targets)
        penalty, losses = self.specialization(model, targets)
        total = task_loss + self.aux_coef * aux_loss + penalty
        return {"loss": total, "task_loss": task_loss, "aux_loss": aux_loss, **losses}
