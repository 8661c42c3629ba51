"""Mixup between domains (Zhang et al., ICLR 2018; Yan et al., 2020; Xu et al., AAAI 2020)."""

from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ArgumentError
from .base import Algorithm, Minibatches, StepContext, mean_scalars
from .ranges import POSITIVE


class Mixup(Algorithm):
    """mean over pairs of a CE(f(x), y_i) + (1 - a) CE(f(x), y_j), x = a x_i + (1 - a) x_j, a ~ Beta(alpha, alpha).

    The domains are put in random order, each is paired with the next one and the last with the first; the larger of
    two minibatches is cut to the smaller. There is one a and one forward pass per pair. Metadata cannot be mixed, so
    models routed by place are refused.
    """

    MIN_DOMAINS = 2
    HPARAMS = MappingProxyType({"mixup_alpha": 0.2})
    RANGES = MappingProxyType({"mixup_alpha": POSITIVE})
    SEARCH = MappingProxyType({"mixup_alpha": lambda random: 10 ** random.uniform(-1, 1)})

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss" and the model's own.

        Raises:
            ArgumentError: The minibatches have metadata.
        """
        if len(minibatches[0]) > 2:
            raise ArgumentError.of("algorithm", "Mixup", "a mixture of images has no one place; take another method")
        order = torch.randperm(len(minibatches)).tolist()
        pairs = zip(order, order[1:] + order[:1], strict=True)
        return mean_scalars([self._mix(context, minibatches[first], minibatches[second]) for first, second in pairs])

    def _mix(self, context: StepContext, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> dict[str, Tensor]:
        size = min(len(first[1]), len(second[1]))
        (x, targets), (y, others) = ((column[:size] for column in minibatch) for minibatch in (first, second))
        alpha = float(self.hparams["mixup_alpha"])
        # From torch's generator, which a resumed run sets: the reference draws from numpy's
        share = torch.distributions.Beta(alpha, alpha).sample().item()
        out = self.forward_domains(context.model, [(share * x + (1 - share) * y, targets)])
        task_loss = share * F.cross_entropy(out.logits, targets) + (1 - share) * F.cross_entropy(out.logits, others)
        return out.scalars(task_loss, task_loss=task_loss)
