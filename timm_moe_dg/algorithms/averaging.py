"""Weight averaging beside the training of any algorithm: what a run's weights are averaged into, and when."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from copy import deepcopy
from types import MappingProxyType

import torch
from torch import Tensor, nn

from .base import SHARE, Tunable


class Averaging(Tunable, ABC):
    """Averages a network's weights, routers included, while it trains.

    A module, so that a resumed run goes on with the averages in its `state_dict`.

    Args:
        network: The network that is trained, not wrapped.
        hparams: The run's hyper-parameters.

    Raises:
        ArgumentError: A hyper-parameter is outside its range.
    """

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(hparams)

    @abstractmethod
    def update(self, network: nn.Module, step: int) -> None:
        """Sees the network's weights after training step `step`, counted from 0."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Sees the mean cross-entropy on the training domains' out-splits at an evaluation, after `update`."""

    def during(self) -> nn.Module | None:
        """The network that evaluations look at while training goes on; None: the trained one."""
        return None

    def final(self) -> nn.Module | None:
        """The average that stands for the run at its end, as a record of its own; None: none beside `during`."""
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
        """The average."""
        return self.average


class MovingAverage(Averaging):
    """Simple moving average: the mean of the weights after step `sma_start_iter` and every later one, buffers copied.

    Steps are counted from 1; before, the average is the trained network. Evaluations look at the average (Arpit et
    al., Ensemble of averages, NeurIPS 2022, whose released code also counts the weights before the start once).
    """

    HPARAMS = MappingProxyType({"sma_start_iter": 100})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        self.average = frozen_copy(network)

    def update(self, network: nn.Module, step: int) -> None:
        """Takes the weights into the mean, or follows them before the start."""
        averaged = max(0, step + 1 - int(self.hparams["sma_start_iter"]))
        move(self.average, network.parameters(), 1 / (averaged + 1))
        copy_buffers(network, self.average)

    def during(self) -> nn.Module:
        """The average."""
        return self.average


def frozen_copy(network: nn.Module) -> nn.Module:
    """Copies a network into one that is never trained."""
    return deepcopy(network).eval().requires_grad_(False)


@torch.no_grad()
def move(average: nn.Module, weights: Iterable[Tensor], share: float) -> None:
    """Average <- average + share * (weights - average), parameter by parameter; a share of 1 copies exactly."""
    for mean, value in zip(average.parameters(), weights, strict=True):
        mean.lerp_(value, share)


@torch.no_grad()
def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copies buffers, such as running statistics, which are not averaged."""
    for old, new in zip(target.buffers(), source.buffers(), strict=True):
        old.copy_(new)
