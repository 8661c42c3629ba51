"""Regularized ERM: of images (Mixup), of logits (SD) and of features (MIRO)."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from .averaging import frozen_copy
from .base import (
    Algorithm,
    Minibatch,
    Minibatches,
    ParameterGroup,
    Setup,
    StepContext,
    Tap,
    cut_to_smaller,
    mean_scalars,
)
from .hparams import POSITIVE, log_uniform

SMALLEST, FIRST = 1e-5, 0.1  # lower bound and initial value of MIRO's variances


class Mixup(Algorithm):
    """mean over pairs of a CE(f(x), y_i) + (1 - a) CE(f(x), y_j), x = a x_i + (1 - a) x_j, a ~ Beta(alpha, alpha).

    Mixup between domains (Yan et al., 2020, arXiv:2001.00677; Xu et al., AAAI 2020). The domains are put in
    random order, and each is paired with the next one, the last with the first. The larger of two minibatches is cut
    to the smaller. There is one a and one forward pass per pair. Metadata cannot be mixed, so minibatches with metadata
    are an error.
    """

    MIN_DOMAINS = 2
    NEEDS_PIXELS = True
    HPARAMS = MappingProxyType({"mixup_alpha": 0.2})
    RANGES = MappingProxyType({"mixup_alpha": POSITIVE})
    SEARCH = MappingProxyType({"mixup_alpha": log_uniform(-1, 1)})

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss" and those of the model."""
        if len(minibatches[0]) > 2:
            raise ArgumentError.of("algorithm", "Mixup", "cannot mix the locations of images; take another method")
        order = torch.randperm(len(minibatches)).tolist()
        pairs = zip(order, order[1:] + order[:1], strict=True)
        return mean_scalars([self._mix(context, minibatches[first], minibatches[second]) for first, second in pairs])

    def _mix(self, context: StepContext, first: Minibatch, second: Minibatch) -> dict[str, Tensor]:
        (x, targets), (y, others) = cut_to_smaller(first, second)
        alpha = float(self.hparams["mixup_alpha"])
        # From torch's generator, which a resumed run restores; the reference draws from numpy's
        share = torch.distributions.Beta(alpha, alpha).sample().item()
        out = self.forward_domains(context.model, [(share * x + (1 - share) * y, targets)])
        task_loss = share * F.cross_entropy(out.logits, targets) + (1 - share) * F.cross_entropy(out.logits, others)
        return out.scalars(task_loss, task_loss=task_loss)


class SD(Algorithm):
    """CE + sd_reg * mean(logits^2), over the concatenated minibatches.

    Spectral decoupling (Pezeshki et al., NeurIPS 2021, arXiv:2011.09468). The reference takes the mean over all
    entries of the logits; the paper writes half the squared norm per image.
    """

    HPARAMS = MappingProxyType({"sd_reg": 0.1})
    SEARCH = MappingProxyType({"sd_reg": log_uniform(-5, -1)})

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and those of the model."""
        out = self.forward_domains(context.model, minibatches)
        task_loss, penalty = F.cross_entropy(out.logits, out.targets), out.logits.square().mean()
        return out.scalars(task_loss + self.hparams["sd_reg"] * penalty, task_loss=task_loss, penalty=penalty)


class MIRO(Algorithm):
    """CE + ld * sum over blocks of mean((f - f0)^2 / v + log v) / 2.

    Keeps features near those of the pretrained network (Cha et al., ECCV 2022, arXiv:2203.10789). f is a block's
    output, and f0 that of a frozen copy of the starting network. The variance v = softplus(b) + 1e-5 per channel starts
    at 0.1, and b is learned at `lr_mult` times the learning rate. Blocks are those in timm's `feature_info` of the
    model: every transformer block, or every stage of a convolutional network, as the reference takes the stem and the
    stages of a ResNet. The copy is in evaluation mode, without router noise and dropout.
    """

    HPARAMS = MappingProxyType({"ld": 0.1, "lr_mult": 10.0})
    SEARCH = MappingProxyType({"ld": lambda random: float(random.choice([0.001, 0.01, 0.1, 1.0]))})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        reference = frozen_copy(setup.network)
        # In a tuple, so that it is not in the state: a resumed run copies the same starting weights
        self._reference = (reference,)
        self._channels, self._features = _tap_blocks(setup.network)
        _, self._reference_features = _tap_blocks(reference, frozen=True)
        first = torch.tensor(FIRST - SMALLEST).expm1().log().item()
        self.b = nn.ParameterList(torch.full((channels,), first) for channels in self._channels)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._reference[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[ParameterGroup]:
        """Returns the variances with their learning rate."""
        return [{"params": list(self.b), "lr": lr * self.hparams["lr_mult"], "weight_decay": weight_decay}]

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and those of the model."""
        out = self.forward_domains(context.model, minibatches)
        images, _, *metadata = (torch.cat(column) for column in zip(*minibatches, strict=True))
        with torch.no_grad(), context.autocast():
            self._reference[0](images, *metadata)
        taps = zip(self._features, self._reference_features, self.b, strict=True)
        penalty = torch.stack([_divergence(tap.take(), reference.take(), b) for tap, reference, b in taps]).sum()
        task_loss = F.cross_entropy(out.logits, out.targets)
        return out.scalars(task_loss + self.hparams["ld"] * penalty, task_loss=task_loss, penalty=penalty)


def _tap_blocks(network: nn.Module, *, frozen: bool = False) -> tuple[list[int], list[Tap]]:
    """Taps the output of each block; returns the numbers of channels and the taps."""
    blocks = getattr(network, "feature_info", None)
    if not isinstance(blocks, list):
        raise ArgumentError.of("model", type(network).__name__, "MIRO needs a model with timm's feature_info")
    taps = [Tap(network, frozen=frozen) for _ in blocks]
    for block, tap in zip(blocks, taps, strict=True):
        network.get_submodule(block["module"]).register_forward_hook(tap.store)
    return [block["num_chs"] for block in blocks], taps


def _divergence(features: Tensor, reference: Tensor, b: Tensor) -> Tensor:
    """The Gaussian negative log-likelihood of features, without its constant."""
    variance = F.softplus(b) + SMALLEST
    if features.ndim == 4 and features.shape[1] == len(b):  # (B, C, H, W) of a convolutional network
        variance = variance[:, None, None]
    return ((features - reference).square() / variance + variance.log()).mean() / 2
