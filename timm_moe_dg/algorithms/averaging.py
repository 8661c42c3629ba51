"""Weight averaging beside the training of any algorithm: what a run's weights are averaged into, and when."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError


class Averaging(nn.Module, ABC):
    """Averages a network's weights, routers included, while it trains.

    A module, so that a resumed run goes on with the averages in its `state_dict`.

    Class attributes:
        HPARAMS: Hyper-parameters and their defaults.

    Args:
        network: The network that is trained, not wrapped.
        hparams: The run's hyper-parameters.
    """

    HPARAMS: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__()
        self.hparams = {**self.HPARAMS, **hparams}

    @abstractmethod
    def update(self, network: nn.Module, step: int) -> None:
        """Sees the network's weights after training step `step`, counted from 0."""

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Sees the mean cross-entropy on the training domains' out-splits at an evaluation."""

    def during(self) -> nn.Module | None:
        """The network that evaluations look at while training goes on; None: the trained one."""
        return None

    def final(self) -> nn.Module | None:
        """The average that stands for the run at its end, as a record of its own; None: none beside `during`."""
        return None


class ExponentialAverage(Averaging):
    """Exponential moving average: average += (1 - decay) * (weights - average) after every step, buffers copied."""

    HPARAMS = MappingProxyType({"ema_decay": 0.9998})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        self.average = frozen_copy(network)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Moves the average towards the weights."""
        for mean, value in zip(self.average.parameters(), network.parameters(), strict=True):
            mean.lerp_(value, 1 - self.hparams["ema_decay"])
        copy_buffers(network, self.average)

    def during(self) -> nn.Module:
        """The average."""
        return self.average


AVERAGING: Mapping[str, type[Averaging]] = MappingProxyType({"ema": ExponentialAverage})


def get_averaging(name: str) -> type[Averaging]:
    """Looks up a way of averaging by its name in `AVERAGING`.

    Raises:
        ArgumentError: There is no such way.
    """
    if name not in AVERAGING:
        raise ArgumentError.of("averaging", name, f"choose from {', '.join(AVERAGING)}")
    return AVERAGING[name]


def frozen_copy(network: nn.Module) -> nn.Module:
    """Copies a network into one that is never trained."""
    return deepcopy(network).eval().requires_grad_(False)


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Copies buffers, such as running statistics, which are not averaged."""
    old: Tensor
    for old, new in zip(target.buffers(), source.buffers(), strict=True):
        old.copy_(new)
