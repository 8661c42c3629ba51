"""Columns that say how certain an answer is: prediction sets and abstention.

Prediction sets are those of split conformal prediction with the score 1 - p(class), which gives the smallest sets on
average (Sadinle, Lei and Wasserman, "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels", JASA 2019).
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cli.arguments import option
from ..cli.values import between, share
from ..errors import ArgumentError
from ..networks.calibration import CALIBRATION, Calibration, Scores, calibration_command, read_calibration

SET, ABSTAIN = "set", "abstain"
_logger = logging.getLogger(__name__)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class CertaintyOptions:
    """Columns that say how certain an answer is. The model has to be calibrated."""

    coverage: float | None = option(None, type=between, metavar="X",
        help="column set: holds the right class with this probability")
    abstain: float | None = option(None, type=share, metavar="X",
        help="column abstain: this share of answers goes to a person")
    calibration: str | None = option(None, metavar="SWEEP",
        help="calibrate on the held-out domains of the runs in this folder (default: on the model's validation images)")
# fmt: on


class Certainty:
    """The columns of `CertaintyOptions`, and of `options.model`.

    Raises:
        ArgumentError: The model is not calibrated, or on too few images.
    """

    def __init__(self, options: Any, calibration: Calibration | None, classes: Sequence[str]) -> None:
        self.classes, self.columns = classes, certainty_columns(options)
        self.level, self.least, self.confident = options.coverage, 0.0, 0.0
        names = ("coverage", "abstain")
        given = {name: value for name in names if (value := getattr(options, name)) is not None}
        if not given and options.calibration is None:
            return
        if not given:
            raise ArgumentError.of("calibration", options.calibration, "has no effect alone; add --coverage")
        if calibration is None:
            remedy = f"{options.model} is not calibrated: {calibration_command(options.model)}"
            raise ArgumentError.of(*next(iter(given.items())), remedy)
        held_out = options.calibration and held_out_scores(Path(options.calibration), calibration)
        scores = held_out or calibration.validation
        self.least = set_threshold(scores.of_target, options.coverage) if options.coverage else 0.0
        self.confident = 0.0 if options.abstain is None else abstention_threshold(scores.confidence, options.abstain)

    @property
    def settings(self) -> list[Any]:
        """Everything that the columns depend on, ready for JSON."""
        return [self.level, self.least, self.confident, None]  # None as in folders that earlier versions began

    def rows(self, probabilities: Tensor) -> dict[str, list[Any]]:
        """(B, C) calibrated probabilities, on CPU -> the columns."""
        table: dict[str, list[Any]] = {}
        if SET in self.columns:
            ranked = zip(*(part.tolist() for part in probabilities.sort(descending=True)), strict=True)
            table[SET] = [[self.classes[c] for p, c in zip(*row, strict=True) if p >= self.least] for row in ranked]
        if ABSTAIN in self.columns:
            table[ABSTAIN] = (probabilities.amax(1) < self.confident).tolist()
        return table


def certainty_columns(options: Any) -> list[str]:
    """Returns the names of the columns that options ask for."""
    return [name for name, value in {SET: options.coverage, ABSTAIN: options.abstain}.items() if value is not None]


def set_threshold(of_target: Tensor, coverage: float) -> float:
    """Returns the least probability of a class in a prediction set.

    With N exchangeable images, a set holds the right class with at least this probability: the threshold is that of
    rank ceil((N + 1) coverage) among their probabilities of the right class, `of_target` (N,), which ascend.

    >>> set_threshold(torch.tensor([0.25, 0.5, 0.75]), 0.5)
    0.5
    """
    count = len(of_target)
    rank = math.ceil((count + 1) * coverage - 1e-9)
    if rank > count:
        needed, most = math.ceil(coverage / (1 - coverage) - 1e-9), math.floor(1000 * count / (count + 1)) / 1000
        remedy = f"needs {needed} images to calibrate on, and there are {count}; "
        remedy += f"give at most {most:g}, or calibrate on more" if most else "calibrate on more"
        raise ArgumentError.of("coverage", coverage, remedy)
    return of_target[count - rank].item()


def abstention_threshold(confidence: Tensor, abstain: float) -> float:
    """Returns the confidence below which this share of (N,) images lies, whose confidences ascend.

    Of equal confidences, such as those that round to 1, all or none lie below. A warning says so.
    """
    rank = math.floor(len(confidence) * abstain + 1e-9)
    threshold = confidence[rank].item() if rank < len(confidence) else math.inf
    below = int((confidence < threshold).sum())
    if rank - below > 0.01 * len(confidence):
        reason = f"because further ones share the confidence {threshold:g}"
        _logger.warning(f"abstain={abstain:g}: {below / len(confidence):.1%} of answers go to a person, {reason}")
    return threshold


def held_out_scores(folder: Path, own: Calibration) -> Scores:
    """Collects the scores on held-out domains of the runs below a folder that share method and classes."""
    places = sorted(path for path in folder.glob("**/best") if path.is_dir())
    calibrations = [read_calibration(path / CALIBRATION) for path in places if (path / CALIBRATION).is_file()]
    if not any(len(item.held_out.confidence) for item in calibrations):
        remedy = f"holds no calibrated run that held out a domain; calibrate each run: {calibration_command('RUN')}"
        raise ArgumentError.of("calibration", str(folder), remedy)
    fitting = [
        item for item in calibrations if (item.method, sorted(item.classes)) == (own.method, sorted(own.classes))
    ]
    if not fitting:
        remedy = f"the model is of {own.method} with {len(own.classes)} classes, and no run is; give the model's sweep"
        raise ArgumentError.of("calibration", str(folder), remedy)
    if len(places) > len(calibrations):
        _logger.warning(f"{folder}: {len(places) - len(calibrations)} of {len(places)} runs are not calibrated")
    parts = [vars(item.held_out) for item in fitting]
    return Scores(*(torch.cat([part[name] for part in parts]).sort().values for name in parts[0]))
