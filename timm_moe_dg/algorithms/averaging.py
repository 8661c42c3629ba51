"""Weight averaging during the training by any method: exponential and simple moving averages, and SWAD.

SWAD averages the weights over a valley of the validation loss (Cha et al., NeurIPS 2021, arXiv:2102.08604).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from copy import deepcopy
from math import isnan
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import DivergenceError
from .hparams import SHARE, Tunable

_logger = logging.getLogger(__name__)


class Averaging(Tunable, ABC):
    """Averages the weights of an unwrapped network, routers included, during training. Its `state_dict` resumes it."""

    NEEDS_VALIDATION = False  # whether `evaluated` decides which weights are averaged

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


class RunningAverage(Averaging):
    """Base of averages that move toward the weights after every step, with buffers copied. Evaluations use them."""

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        self.average = frozen_copy(network)

    @abstractmethod
    def share(self, step: int) -> float:
        """Returns the share of the weights after a step: average += share * (weights - average)."""

    def update(self, network: nn.Module, step: int) -> None:
        """Moves the average toward the weights."""
        move(self.average, network.parameters(), self.share(step))
        copy_buffers(network, self.average)

    def during(self) -> nn.Module:
        """Returns the average."""
        return self.average


class ExponentialAverage(RunningAverage):
    """Exponential moving average, with a share of 1 - decay after every step."""

    HPARAMS = MappingProxyType({"ema_decay": 0.9998})
    RANGES = MappingProxyType({"ema_decay": SHARE})

    def share(self, step: int) -> float:
        """Returns 1 - decay."""
        return 1 - self.hparams["ema_decay"]


class MovingAverage(RunningAverage):
    """Simple moving average: the mean of the weights after step `sma_start_iter` and every later one.

    Steps are counted from 1. Before the start the average equals the trained network (Arpit et al., NeurIPS 2022,
    arXiv:2110.10832; their released code also counts the weights before the start).
    """

    HPARAMS = MappingProxyType({"sma_start_iter": 100})

    def share(self, step: int) -> float:
        """Returns 1 / the number of steps in the mean."""
        return 1 / (max(0, step + 1 - int(self.hparams["sma_start_iter"])) + 1)


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


class Segment:
    """Mean of the weights after some steps."""

    def __init__(self, weights: list[Tensor] | None = None, count: int = 0) -> None:
        self.weights = weights or []
        self.count = count

    @torch.no_grad()
    def add(self, other: "Segment") -> None:
        """Takes another segment into the mean, weighted by its number of steps."""
        if not self.count:
            self.weights = [weight.detach().clone() for weight in other.weights]
        elif other.count:
            share = other.count / (self.count + other.count)
            for mean, weight in zip(self.weights, other.weights, strict=True):
                mean.lerp_(weight, share)
        self.count += other.count

    def copy(self) -> "Segment":
        """Returns a copy."""
        return Segment([weight.clone() for weight in self.weights], self.count)


def weights_of(network: nn.Module) -> Segment:
    """Returns the current weights as a segment of one step, not copied."""
    return Segment([parameter.detach() for parameter in network.parameters()], 1)


class ValleyAverage(Averaging):
    """Base of both forms of SWAD, which average segments between evaluations."""

    NEEDS_VALIDATION = True
    HPARAMS = MappingProxyType({"swad_n_converge": 3, "swad_n_tolerance": 6, "swad_tolerance_ratio": 0.3})

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        # In tuples, so that they are not in the state. Copied now, because after a training forward the layers hold
        # reports that belong to a graph and cannot be copied
        self._network, self._copy = (network,), (frozen_copy(network),)
        self._average = Segment()  # steps that are certain to be in the valley
        self._since = Segment()  # steps after the last evaluation
        self._ended = False

    def update(self, network: nn.Module, step: int) -> None:
        """Collects the weights."""
        if not self._ended:
            self._since.add(weights_of(network))

    def evaluated(self, step: int, validation_loss: float) -> None:
        """Takes in a validation loss. No comparison with NaN is true, so the search would stay where it is."""
        if isnan(validation_loss):
            remedy = f"no number at step {step}, so that SWAD cannot compare; lower --lr, or check the images"
            raise DivergenceError(f"validation_loss=nan: {remedy}")
        if not self._ended:
            self.search(step, validation_loss)

    @abstractmethod
    def search(self, step: int, validation_loss: float) -> None:
        """Searches for the valley's start and end, until it has ended."""

    def filled(self, segment: Segment) -> nn.Module:
        """Fills the copy of the network with a segment's weights and the network's buffers."""
        copy = self._copy[0].to(segment.weights[0].device)
        copy_buffers(self._network[0], copy)
        move(copy, segment.weights, 1.0)
        return copy

    def get_extra_state(self) -> dict[str, Any]:
        """Returns segments as lists of tensors, and numbers."""
        return {"average": {**vars(self._average)}, "since": {**vars(self._since)}, "ended": self._ended}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores that state."""
        self._average, self._since, self._ended = self.read(state["average"]), self.read(state["since"]), state["ended"]

    def read(self, state: Mapping[str, Any]) -> Segment:
        """Returns the segment of a state, on the network's device."""
        parameters = self._network[0].parameters()
        pairs = zip(state["weights"], parameters, strict=bool(state["weights"]))  # an empty segment has none
        return Segment([weight.to(parameter.device) for weight, parameter in pairs], state["count"])


class SWAD(ValleyAverage):
    """Mean of the weights after every step from the detected start to the detected end, each once.

    The start is the first evaluation whose validation loss is not above that of the next swad_n_converge - 1. The
    threshold is then (1 + swad_tolerance_ratio) times the mean loss of these swad_n_converge evaluations. The end is
    the last evaluation before swad_n_tolerance evaluations in a row above the threshold, or else the run's last step.
    This is the paper's algorithm (Cha et al., NeurIPS 2021, arXiv:2102.08604), with evaluations in place of steps, as
    in its experiments. `ReleasedSWAD` is the authors' code, which differs.

    A run whose loss still falls has no start. The mean is then over the steps from its lowest loss on, with a warning.
    (The paper's algorithm would average the whole run, the released code the steps between its last two evaluations.)
    Buffers are those of the network at the run's last step.
    """

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        # Later evaluations: their losses, and the steps up to each. Before the start is known these are the evaluations
        # after the lowest loss; in the valley, those in a row above the threshold
        self._waiting: list[tuple[float, Segment]] = []
        self._lowest: float | None = None
        self._threshold: float | None = None
        self._start = 0

    def search(self, step: int, validation_loss: float) -> None:
        """Searches for the start of the valley, then for its end."""
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
        """Sets the start and the threshold, and decides about the waiting evaluations."""
        assert self._lowest is not None
        losses = [self._lowest, *(loss for loss, _ in self._waiting)]
        self._threshold = (1 + self.hparams["swad_tolerance_ratio"]) * sum(losses) / len(losses)
        waiting, self._waiting = self._waiting, []
        for loss, segment in waiting:
            self._go_on(loss, segment)
        # Only a later evaluation can make an end
        self._confirm(len(self._waiting) - int(self.hparams["swad_n_tolerance"]) + 1)

    def _go_on(self, loss: float, segment: Segment) -> None:
        """Confirms an evaluation in the valley and all waiting ones, or lets it wait if its loss is too high."""
        assert self._threshold is not None
        self._waiting.append((loss, segment))
        if loss <= self._threshold:
            self._confirm(len(self._waiting))

    def _confirm(self, number: int) -> None:
        """Takes the first of the waiting evaluations into the average."""
        number = max(0, number)
        for _, segment in self._waiting[:number]:
            self._average.add(segment)
        self._waiting = self._waiting[number:]

    def final(self) -> nn.Module | None:
        """Returns the mean over the valley; None before the first evaluation."""
        if self._lowest is None:
            return None
        if self._threshold is None:
            _logger.warning("SWAD: the validation loss has not settled; averaging from step %d on", self._start)
        total = self._average.copy()
        for segment in (*(segment for _, segment in self._waiting), self._since):
            total.add(segment)
        return self.filled(total)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns segments as lists of tensors, and numbers."""
        return {
            **super().get_extra_state(),
            "waiting": [{"loss": loss, **vars(segment)} for loss, segment in self._waiting],
            "lowest": self._lowest,
            "threshold": self._threshold,
            "start": self._start,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores that state."""
        super().set_extra_state(state)
        self._waiting = [(item["loss"], self.read(item)) for item in state["waiting"]]
        self._lowest, self._threshold, self._start = state["lowest"], state["threshold"], state["start"]


Evaluation = tuple[int, float, Segment]  # step, validation loss, mean weights of the steps up to it


class ReleasedSWAD(ValleyAverage):
    """Mean of segments, each the mean weights between two evaluations, chosen as in khanrc/swad.

    Differences from `SWAD` (Cha et al., NeurIPS 2021, arXiv:2102.08604):

    - Segments have equal weights, whatever their numbers of steps (the first has one).
    - The average starts a segment earlier, because a segment ends with its evaluation.
    - On convergence, earlier segments below the threshold are included, all but the earliest of them.
    - Segments enter oldest first, swad_n_tolerance evaluations late. The segment of convergence therefore enters twice
      if there were such earlier ones, and the first segments of a run several times if the loss settles at once.
    - At the end of the run the oldest segment in the queue is dropped.
    - Without convergence the average is the last segment.

    Training continues after the end of the valley; the released code stops there.
    """

    def __init__(self, network: nn.Module, hparams: Mapping[str, float]) -> None:
        super().__init__(network, hparams)
        self._patience, self._tolerance = (int(self.hparams[name]) for name in ("swad_n_converge", "swad_n_tolerance"))
        self._recent: list[Evaluation] = []
        self._converged: int | None = None
        self._threshold = 0.0

    def search(self, step: int, validation_loss: float) -> None:
        """Searches for convergence, then adds the oldest segment of the queue or ends the valley."""
        self._recent.append((step, validation_loss, self._since))
        self._recent = self._recent[-max(self._patience, self._tolerance) :]
        self._since = Segment()
        queue = self._recent[-self._tolerance :]
        if self._converged is None:
            self._search_convergence(queue)
        elif queue[0][0] >= self._converged:
            if _lowest(queue) > self._threshold:
                self._ended = True
            else:
                self._add(queue[0])

    def _search_convergence(self, queue: list[Evaluation]) -> None:
        window = self._recent[-self._patience :]
        step, loss, segment = window[0]
        if len(window) < self._patience or loss > _lowest(window):
            return
        self._converged = step
        self._average = Segment(segment.copy().weights)  # count 0: the first added segment replaces it
        self._threshold = (1 + self.hparams["swad_tolerance_ratio"]) * sum(item[1] for item in window) / len(window)
        ahead = self._patience - self._tolerance
        early = queue[: 1 - ahead] if ahead < 0 else []
        above = [index for index, item in enumerate(early) if item[1] > self._threshold]
        for item in [*window[1 : 1 + max(0, ahead)], *early[max(above, default=-1) + 2 :]]:
            self._add(item)

    def _add(self, item: Evaluation) -> None:
        self._average.add(Segment(item[2].weights, 1))

    def final(self) -> nn.Module | None:
        """Returns the mean of the segments; None before the first evaluation."""
        if not self._recent:
            return None
        if self._converged is None:
            _logger.warning("SWAD: the validation loss has not settled; averaging the last segment")
            return self.filled(self._recent[-1][2])
        total = self._average.copy()
        queue = [] if self._ended else self._recent[-self._tolerance :][1:]
        while queue and _lowest(queue) <= self._threshold:
            total.add(Segment(queue.pop(0)[2].weights, 1))
        return self.filled(total)

    def get_extra_state(self) -> dict[str, Any]:
        """Returns segments as lists of tensors, and numbers."""
        return {
            **super().get_extra_state(),
            "recent": [{"step": step, "loss": loss, **vars(segment)} for step, loss, segment in self._recent],
            "converged": self._converged,
            "threshold": self._threshold,
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restores that state."""
        super().set_extra_state(state)
        self._recent = [(item["step"], item["loss"], self.read(item)) for item in state["recent"]]
        self._converged, self._threshold = state["converged"], state["threshold"]


def _lowest(evaluations: list[Evaluation]) -> float:
    return min(loss for _, loss, _ in evaluations)
