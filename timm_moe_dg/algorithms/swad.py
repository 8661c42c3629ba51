"""SWAD: dense weight averaging over a valley of the validation loss (Cha et al., NeurIPS 2021)."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict

import torch
from torch import Tensor, nn

from .averaging import Averaging, copy_buffers, frozen_copy, move

_logger = logging.getLogger(__name__)


class SegmentState(TypedDict):
    """What a checkpoint keeps of a `Segment`."""

    weights: list[Tensor]
    count: int


class WaitingState(SegmentState):
    """The same with the validation loss at its end."""

    loss: float


class SWADState(TypedDict):
    """What a checkpoint keeps of `SWAD`."""

    average: SegmentState
    since: SegmentState
    waiting: list[WaitingState]
    lowest: float | None
    threshold: float | None
    start: int
    ended: bool


class Segment:
    """Mean of the weights after some steps."""

    def __init__(self, weights: list[Tensor] | None = None, count: int = 0) -> None:
        self.weights = weights or []
        self.count = count

    @torch.no_grad()
    def add(self, other: "Segment") -> None:
        """Takes as many further weights into the mean as the other stands for."""
        if not self.count:
            self.weights = [weight.detach().clone() for weight in other.weights]
        elif other.count:
            share = other.count / (self.count + other.count)
            for mean, weight in zip(self.weights, other.weights, strict=True):
                mean.lerp_(weight, share)
        self.count += other.count

    def copy(self) -> "Segment":
        """A segment that is added to without changing this one."""
        return Segment([weight.clone() for weight in self.weights], self.count)

    def state(self) -> SegmentState:
        """Tensors and a number, for a checkpoint."""
        return {"weights": self.weights, "count": self.count}


def weights_of(network: nn.Module) -> Segment:
    """The weights as they are, as a segment of one step; not copied."""
    return Segment([parameter.detach() for parameter in network.parameters()], 1)


class SWAD(Averaging):
    """Mean of the weights after every step from the detected start to the detected end, each once.

    The start is the first evaluation whose validation loss none of the next swad_n_converge - 1 falls below. The
    threshold is then (1 + swad_tolerance_ratio) times the mean loss of these swad_n_converge evaluations. The end is
    the last evaluation before swad_n_tolerance in a row that are above the threshold, or else the run's last step.
    As the paper's algorithm, which evaluates after every step; here, as in its experiments, only evaluations are
    looked at. What the released code does differently is `ReleasedSWAD`.

    A run whose loss still falls has no start; the mean is then over the steps from its lowest loss on, the best guess
    at a start, with a warning. (The paper's algorithm would average the whole run, the released code the steps between
    its last two evaluations.) Buffers are those of the network at the run's last step.
    """

    HPARAMS = MappingProxyType({"swad_n_converge": 3, "swad_n_tolerance": 6, "swad_tolerance_ratio": 0.3})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        # Tuples, which keep them out of the state. The copy is made now: after a training forward, layers hold what
        # they reported, graph and all, and cannot be copied
        self._network, self._copy = (network,), (frozen_copy(network),)
        self._average = Segment()  # of the valley as far as it is certain
        self._since = Segment()  # of the steps after the last evaluation
        # Evaluations after those in the average: their losses, and the steps up to each. While the start is sought,
        # these are the evaluations after the lowest loss; in the valley, those in a row above the threshold
        self._waiting: list[tuple[float, Segment]] = []
        self._lowest: float | None = None
        self._threshold: float | None = None
        self._start = 0
        self._ended = False

    def update(self, network: nn.Module, step: int) -> None:
        """Collects the weights."""
        if not self._ended:
            self._since.add(weights_of(network))

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Looks for the start, then for the end."""
        if self._ended:
            return
        segment, self._since = self._since, Segment()
        if self._threshold is not None:
            self._go_on(validation_loss, segment)
            if len(self._waiting) == self.hparams["swad_n_tolerance"]:
                self._waiting, self._ended = [], True
        elif self._lowest is None or validation_loss < self._lowest:
            self._lowest, self._start, self._waiting = validation_loss, step, []
            self._average = weights_of(self._network[0]).copy()
        else:
            self._waiting.append((validation_loss, segment))
        if self._threshold is None and len(self._waiting) == self.hparams["swad_n_converge"] - 1:
            self._enter()

    def _enter(self) -> None:
        """Fixes the start and the threshold, and looks at what waited."""
        assert self._lowest is not None
        losses = [self._lowest, *(loss for loss, _ in self._waiting)]
        self._threshold = (1 + self.hparams["swad_tolerance_ratio"]) * sum(losses) / len(losses)
        waiting, self._waiting = self._waiting, []
        for loss, segment in waiting:
            self._go_on(loss, segment)
        # Only a later evaluation can make an end
        self._confirm(len(self._waiting) - int(self.hparams["swad_n_tolerance"]) + 1)

    def _go_on(self, loss: float, segment: Segment) -> None:
        """Lets an evaluation in the valley wait, or confirms it and all that wait."""
        assert self._threshold is not None
        self._waiting.append((loss, segment))
        if loss <= self._threshold:
            self._confirm(len(self._waiting))

    def _confirm(self, number: int) -> None:
        """Takes the first that wait into the average."""
        number = max(0, number)
        for _, segment in self._waiting[:number]:
            self._average.add(segment)
        self._waiting = self._waiting[number:]

    def final(self) -> nn.Module | None:
        """The mean over the valley; None before the first evaluation."""
        if self._lowest is None:
            return None
        if self._threshold is None:
            _logger.warning("SWAD: the validation loss has not settled; averaging from step %d on", self._start)
        total = self._average.copy()
        for segment in (*(segment for _, segment in self._waiting), self._since):
            total.add(segment)
        return filled(self._copy[0], self._network[0], total)

    def get_extra_state(self) -> SWADState:
        """Segments as lists of tensors, and numbers."""
        return {
            "average": self._average.state(),
            "since": self._since.state(),
            "waiting": [{"loss": loss, **segment.state()} for loss, segment in self._waiting],
            "lowest": self._lowest,
            "threshold": self._threshold,
            "start": self._start,
            "ended": self._ended,
        }

    def set_extra_state(self, state: SWADState) -> None:
        """Restores that state."""
        self._average, self._since = (read(part, self._network[0]) for part in (state["average"], state["since"]))
        self._waiting = [(item["loss"], read(item, self._network[0])) for item in state["waiting"]]
        self._lowest, self._threshold = state["lowest"], state["threshold"]
        self._start, self._ended = state["start"], state["ended"]


def read(state: SegmentState, network: nn.Module) -> Segment:
    """The segment of a state, on the network's device."""
    pairs = zip(state["weights"], network.parameters(), strict=bool(state["weights"]))  # a new segment has none
    return Segment([weight.to(parameter.device) for weight, parameter in pairs], state["count"])


def filled(copy: nn.Module, network: nn.Module, segment: Segment) -> nn.Module:
    """A copy of a network with that network's buffers, on its device, and a segment's weights."""
    copy.to(segment.weights[0].device)
    copy_buffers(network, copy)
    move(copy, segment.weights, 1.0)
    return copy
