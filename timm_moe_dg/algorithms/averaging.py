"""Weight averaging during the training by any method: exponential and simple moving averages."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from copy import deepcopy
from types import MappingProxyType

import torch
from torch import Tensor, nn

from .base import SHARE, Tunable


class Averaging(Tunable, ABC):
    """Averages the weights of an unwrapped network, routers included, during training. Its `state_dict` resumes it."""

    NEEDS_VALIDATION = False  # whether `evaluated` decides which weights are averaged
    SHARDS = True  # whether a network that is divided over processes can be averaged

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(hparams)

    @abstractmethod
    def update(self, network: nn.Module, step: int) -> None:
        """Takes in the network's weights after training step `step`, counted from 0."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Takes in the mean cross-entropy on the training domains' out-splits at an evaluation, after `update`.

        Domains without an out-split do not count. NaN stands for no validation image at all.
        """

    def during(self) -> nn.Module | None:
        """Returns the network to evaluate during training; None for the trained network."""
        return None

    def final(self) -> nn.Module | None:
        """Returns the average to evaluate at the end of the run; None for none beside `during`."""
        return None


class ExponentialAverage(Averaging):
    """Exponential moving average: average += (1 - decay) * (weights - average) after every step, buffers copied."""

    HPARAMS = MappingProxyType({"ema_decay": 0.9998})
    RANGES = MappingProxyType({"ema_decay": SHARE})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        self.average = frozen_copy(network)

    def update(self, network: nn.Module, step: int) -> None:
        """Moves the average toward the weights."""
        move(self.average, network.parameters(), 1 - self.hparams["ema_decay"])
        copy_buffers(network, self.average)

    def during(self) -> nn.Module:
        """Returns the average."""
        return self.average


class MovingAverage(Averaging):
    """Simple moving average: the mean of the weights after step `sma_start_iter` and every later one, buffers copied.

    Steps are counted from 1. Before the start the average equals the trained network. Evaluations use the average
    (Arpit et al., NeurIPS 2022, arXiv:2110.10832; their released code also counts the weights before the start).
    """

    HPARAMS = MappingProxyType({"sma_start_iter": 100})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        self.average = frozen_copy(network)

    def update(self, network: nn.Module, step: int) -> None:
        """Takes the weights into the mean, or copies them before the start."""
        averaged = max(0, step + 1 - int(self.hparams["sma_start_iter"]))
        move(self.average, network.parameters(), 1 / (averaged + 1))
        copy_buffers(network, self.average)

    def during(self) -> nn.Module:
        """Returns the average."""
        return self.average


def frozen_copy(network: nn.Module) -> nn.Module:
    """Copies a network into one in evaluation mode without gradients."""
    return deepcopy(network).eval().requires_grad_(False)


@torch.no_grad()
def move(average: nn.Module, weights: Iterable[Tensor], share: float) -> None:
    """Moves each parameter: average <- average + share * (weights - average). A share of 1 copies exactly."""
    for mean, value in zip(average.parameters(), weights, strict=True):
        mean.lerp_(value, share)


@torch.no_grad()
def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copies buffers, such as running statistics."""
    for old, new in zip(target.buffers(), source.buffers(), strict=True):
        old.copy_(new)
