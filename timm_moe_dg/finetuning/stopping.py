"""Reasons to end a run early: diverged training, the SIGTERM of schedulers, and Ctrl-C."""

import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from ..errors import DivergenceError, RunInterruptedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Two consecutive layers multiply their weights and a norm squares the product. With weights beyond this, float32
# overflows and the network returns NaN, although the weights are finite.
LARGEST = torch.finfo(torch.float32).max ** 0.25
Item = TypeVar("Item")


class DivergenceCheck:
    """Detects non-finite training and names the first suspect step."""

    def __init__(self, first_step: int, domains: Sequence[str]) -> None:
        self._unchecked = first_step
        self._domains = domains

    def __call__(self, step: int, total: Tensor, checkpoint: str) -> None:
        """Checks the steps since the last call, up to `step`, the one just taken.

        `total` is a sum over these steps, finite only if every step's value was. Reading it waits for the device.
        `checkpoint` names the last good checkpoint, for the message.
        """
        value = total.item()
        if not math.isfinite(value):
            since = f"at step {step}" if step <= self._unchecked else f"in one of the steps {self._unchecked} to {step}"
            raise DivergenceError(
                f"loss={value}: not finite {since}, on a batch of {', '.join(self._domains)}; lower --lr, warm up, or "
                f"train without --amp-dtype float16; last good checkpoint: {checkpoint}"
            )
        self._unchecked = step + 1


def nan_if_not_finite(total: Tensor, network: nn.Module) -> Tensor:
    """Returns a sum of losses, or NaN if a weight of the network is not finite."""
    finite = torch.stack([local(parameter).isfinite().all() for parameter in network.parameters()]).all()
    return torch.where(finite, total, torch.full_like(total, math.nan))


def check_weights(network: nn.Module, step: int, checkpoint: str) -> None:
    """Checks that no weight is above `LARGEST`, so that a checkpoint of the network is of use."""
    shards = [local(parameter) for parameter in network.parameters()]
    total = torch.stack([shard.abs().max() for shard in shards if shard.numel()]).max()
    if any(isinstance(parameter, DTensor) for parameter in network.parameters()):
        distributed.all_reduce(total, distributed.ReduceOp.MAX)
    largest = total.item()
    if not largest <= LARGEST:
        raise DivergenceError(
            f"weights={largest:.1e}: too large after step {step} to go on with; lower --lr, or warm up; last good "
            f"checkpoint: {checkpoint}"
        )


def local(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter without its gradient, or this process's shard of it."""
    value = parameter.detach()
    return value.to_local() if isinstance(value, DTensor) else value


class Interrupted(Exception):  # noqa: N818 (not an error)
    """Raised at a safe point after SIGTERM or Ctrl-C."""


class Interruption:
    """Catches SIGTERM and Ctrl-C while it is entered as a context. A second Ctrl-C ends the process at once.

    Outside of the main thread, which alone gets signals, nothing is caught.
    """

    def __init__(self, num_processes: int = 1, timeout: timedelta | None = None) -> None:
        self._signal = 0  # number of the signal that came
        # Over gloo, between CPUs: asking the accelerator would wait for it. Any: torch has no type for groups.
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout) if num_processes > 1 else None

    def __enter__(self) -> Self:
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def error(self, message: str) -> RunInterruptedError:
        """Makes the error of a run that the signal ended, with its exit status."""
        error = RunInterruptedError(message)
        error.exit_code = 128 + self._signal
        return error

    def should_stop(self) -> bool:
        """Whether any process got a signal. Every process has to call it, and all get the same answer."""
        if self._group is not None:
            largest = torch.tensor(self._signal)
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
            self._signal = int(largest)
        return bool(self._signal)

    def until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields items until a process gets a signal, and then raises `Interrupted`."""
        for item in items:
            if self.should_stop():
                raise Interrupted
            yield item

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # print may not be entered twice, as it would be if the signal came during a print
            os.write(2, b"\nending after this step; Ctrl-C again ends at once\n")
