"""MIRO: features kept near those of the pretrained network (Cha et al., ECCV 2022)."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError
from ..losses import feature_divergence
from .averaging import frozen_copy
from .base import Algorithm, Minibatches, Setup, StepContext
from .taps import Tap

SMALLEST, FIRST = 1e-5, 0.1  # variance


class MIRO(Algorithm):
    """CE + ld * sum over blocks of mean((f - f0)^2 / v + log v) / 2.

    f is a block's output and f0 that of a frozen twin, the network as the run started; v = softplus(b) + 1e-5 per
    channel starts at 0.1, and b is learned at `lr_mult` times the rate. Blocks are those that timm lists in a model's
    `feature_info`: every transformer block, every stage of a convolutional network, as the reference takes the stem
    and the stages of a ResNet. The twin is in evaluation mode, without router noise and dropout.

    The twin is not in the state: a resumed run makes it from the same starting weights.

    Raises:
        ArgumentError: The network does not list its blocks.
    """

    HPARAMS = MappingProxyType({"ld": 0.1, "lr_mult": 10.0})
    SEARCH = MappingProxyType({"ld": lambda random: float(random.choice([0.001, 0.01, 0.1, 1.0]))})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        twin = frozen_copy(setup.network)
        self._twin = (twin,)  # a tuple, whose modules are not in the state
        self._channels, self._features = _tap_blocks(setup.network)
        _, self._references = _tap_blocks(twin, frozen=True)
        first = torch.tensor(FIRST - SMALLEST).expm1().log().item()
        self.b = nn.ParameterList(torch.full((channels,), first) for channels in self._channels)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._twin[0]._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """The variances, at their own rate."""
        return [{"params": list(self.b), "lr": lr * self.hparams["lr_mult"], "weight_decay": weight_decay}]

    def objective(self, context: StepContext, minibatches: Minibatches) -> dict[str, Tensor]:
        """Returns "loss" and its parts "task_loss", "penalty" and the model's own."""
        out = self.forward_domains(context.model, minibatches)
        images, _, *metadata = (torch.cat(column) for column in zip(*minibatches, strict=True))
        with torch.no_grad(), context.autocast():
            self._twin[0](images, *metadata)
        taps = zip(self._features, self._references, self.b, strict=True)
        penalty = torch.stack([_divergence(tap.take(), reference.take(), b) for tap, reference, b in taps]).sum()
        task_loss = F.cross_entropy(out.logits, out.targets)
        return out.scalars(task_loss + self.hparams["ld"] * penalty, task_loss=task_loss, penalty=penalty)


def _tap_blocks(network: nn.Module, *, frozen: bool = False) -> tuple[list[int], list[Tap]]:
    """Taps what each block gives; returns their channels too."""
    blocks: Any = getattr(network, "feature_info", None)
    if not isinstance(blocks, list):
        raise ArgumentError.of("model", type(network).__name__, "MIRO needs a model with timm's feature_info")
    taps = [Tap(network, frozen=frozen) for _ in blocks]
    for block, tap in zip(blocks, taps, strict=True):
        network.get_submodule(block["module"]).register_forward_hook(tap.keep_output)
    return [block["num_chs"] for block in blocks], taps


def _divergence(features: Tensor, reference: Tensor, b: Tensor) -> Tensor:
    variance = F.softplus(b) + SMALLEST
    if features.ndim == 4 and features.shape[1] == len(b):  # (B, C, H, W) of a convolutional network
        variance = variance[:, None, None]
    return feature_divergence(features, reference, variance)
