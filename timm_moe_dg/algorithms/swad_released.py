"""SWAD as in its authors' released code, which differs from the paper."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from .swad import Segment, ValleyAverage

_logger = logging.getLogger(__name__)
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
