"""Why a run stops early: training that has diverged, the SIGTERM of schedulers, and Ctrl-C."""

import math
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn

from ..errors import DivergenceError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Two layers in a row multiply their weights and a norm takes the square: beyond this float32 overflows, and a network
# with such weights, finite as they are, gives nothing but NaN
LARGEST = torch.finfo(torch.float32).max ** 0.25
Item = TypeVar("Item")


class DivergenceCheck:
    """Detects non-finite training and names the first suspect step.

    Args:
        first_step: The step that training starts or goes on with.
        domains: Names of the training domains, all of which are in every step's batch.
    """

    def __init__(self, first_step: int, domains: Sequence[str]) -> None:
        self._unchecked = first_step
        self._domains = domains

    def __call__(self, step: int, total: Tensor, checkpoint: str) -> None:
        """Checks the steps since the last call, up to `step`.

        Args:
            step: The step that was just taken.
            total: A sum over these steps that is finite only if they all were; reading it waits for the device.
            checkpoint: The last good one, for the message.

        Raises:
            DivergenceError: It is not finite.
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
    """Makes a sum of losses not finite where a weight of the network is not."""
    finite = torch.stack([parameter.detach().isfinite().all() for parameter in network.parameters()]).all()
    return torch.where(finite, total, torch.full_like(total, math.nan))


def check_weights(network: nn.Module, step: int, checkpoint: str) -> None:
    """Makes sure that a network is worth keeping: weights above `LARGEST` are finite, and lead to NaN.

    Args:
        network: The network.
        step: The step that was just taken.
        checkpoint: The last good one, for the message.

    Raises:
        DivergenceError: A weight is too large.
    """
    largest = torch.stack([parameter.detach().abs().max() for parameter in network.parameters()]).max().item()
    if not largest <= LARGEST:
        raise DivergenceError(
            f"weights={largest:.1e}: too large after step {step} to go on with; lower --lr, or warm up; last good "
            f"checkpoint: {checkpoint}"
        )


class Interrupted(Exception):  # noqa: N818 (no mistake of anybody's)
    """Raised at a safe point after SIGTERM or Ctrl-C."""


class Interruption:
    """Notes SIGTERM and Ctrl-C while it is entered as a context; a second Ctrl-C ends the process at once.

    Args:
        num_processes: How many processes have to agree. They do so over gloo, between CPUs, so that an accelerator is
            not waited for.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self._noted = 0  # the signal's number
        self._group: Any = (
            distributed.new_group(backend="gloo") if num_processes > 1 else None
        )  # torch does not type it

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What shells report for a process that the signal ended."""
        return 128 + self._noted

    def should_stop(self) -> bool:
        """Whether any process was told to end. All processes have to ask, and get the same answer."""
        if self._group is not None:
            noted = torch.tensor(self._noted)
            distributed.all_reduce(noted, distributed.ReduceOp.MAX, group=self._group)
            self._noted = int(noted)
        return bool(self._noted)

    def until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        """Passes items on until a process was told to end.

        Raises:
            Interrupted: One was.
        """
        for item in items:
            if self.should_stop():
                raise Interrupted
            yield item

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.write(2, b"\nending after this step; Ctrl-C again ends at once\n")  # print may not be entered twice
