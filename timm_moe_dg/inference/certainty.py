"""Columns that say how certain an answer is: prediction sets, abstention, and nodes of a class tree.

Prediction sets are those of split conformal prediction with the score 1 - p(class), which gives the smallest sets on
average (Sadinle, Lei and Wasserman, "Least Ambiguous Set-Valued Classifiers with Bounded Error Levels", JASA 2019).
"""

import csv
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cli.arguments import option
from ..cli.values import between, share
from ..errors import ArgumentError, DataError, check_regular_file
from ..networks.calibration import CALIBRATION, Calibration, Scores, calibration_command, read_calibration

SET, ABSTAIN, NODE, NODE_PROBABILITY = "set", "abstain", "node", "node_probability"
_logger = logging.getLogger(__name__)


# fmt: off
@dataclass(frozen=True, kw_only=True)
class CertaintyOptions:
    """Columns that say how certain an answer is. The model has to be calibrated."""

    coverage: float | None = option(None, type=between, metavar="X",
        help="add the column set: classes that hold the right one with this probability, such as 0.9")
    abstain: float | None = option(None, type=share, metavar="X",
        help="add the column abstain: true for this share of answers, the least certain ones of validation images")
    calibration: str | None = option(None, metavar="SWEEP",
        help="calibrate on the held-out domains of the runs in this folder (default: on the model's validation images)")
    class_tree: str | None = option(None, metavar="FILE",
        help="add the column node: the lowest class or group of this tree (.csv, .json) that has --coverage")
# fmt: on


class ClassTree:
    """A tree whose leaves are the classes.

    Args:
        path: A JSON object from each name to its parent, or a CSV file with the columns class and parent.
        classes: Names of the classes, C of them.

    Raises:
        ArgumentError: A class is missing, or the names do not form one tree.
    """

    def __init__(self, path: str, classes: Sequence[str]) -> None:
        parents = _read_parents(path)
        if missing := [name for name in classes if name not in parents]:
            raise ArgumentError.of("class_tree", path, f"misses the class {missing[0]!r}; add its parent")
        paths = [_to_root(path, parents, name) for name in classes]
        if others := {line[-1] for line in paths} - {paths[0][-1]}:
            remedy = f"has the roots {paths[0][-1]!r} and {min(others)!r}; give them a common parent"
            raise ArgumentError.of("class_tree", path, remedy)
        depths = {name: len(line) - number for line in paths for number, name in enumerate(line)}
        self.names = sorted(depths, key=lambda name: -depths[name])
        self._depths = torch.tensor([depths[name] for name in self.names])
        self.holds = torch.tensor([[float(name in line) for line in paths] for name in self.names])

    def lowest(self, probabilities: Tensor, level: float) -> tuple[list[str], list[float]]:
        """(B, C) probabilities -> the lowest node of at least this probability, and the sum over its leaves."""
        sums = probabilities @ self.holds.T
        # The root has 1, which rounding may miss. Of equally low nodes, the more probable one
        rank = torch.where(sums >= min(level, 1 - 1e-6), self._depths + sums / 2, 0.0)
        best = rank.argmax(1)
        return [self.names[index] for index in best], sums[torch.arange(len(best)), best].tolist()


class Certainty:
    """The columns of `CertaintyOptions`.

    Args:
        options: Those of `CertaintyOptions`, and the model.
        calibration: That of the model.
        classes: Names in the order of the logits.

    Raises:
        ArgumentError: The model is not calibrated, or on too few images.
    """

    def __init__(self, options: Any, calibration: Calibration | None, classes: Sequence[str]) -> None:
        self.classes, self.coverage = classes, options.coverage
        self.columns = certainty_columns(options)
        self.tree = None
        if not self.columns and options.calibration is None:
            return
        if not self.columns:
            remedy = "has no effect alone; add --coverage or --abstain"
            raise ArgumentError.of("calibration", options.calibration, remedy)
        if calibration is None:
            given = next(name for name in ("coverage", "abstain", "class_tree") if getattr(options, name) is not None)
            remedy = f"{options.model} is not calibrated: {calibration_command(options.model)}"
            raise ArgumentError.of(given, getattr(options, given), remedy)
        scores = calibration.validation
        if options.calibration is not None:
            scores = held_out_scores(Path(options.calibration), calibration)
        if options.coverage is not None:
            self.least = set_threshold(scores.of_target, options.coverage)
        if options.abstain is not None:
            self.confident = abstention_threshold(scores.confidence, options.abstain)
        if options.class_tree is not None:
            if options.coverage is None:
                raise ArgumentError.of("class_tree", options.class_tree, "add --coverage, the probability of a node")
            self.tree = ClassTree(options.class_tree, classes)

    def describe(self) -> list[Any]:
        """Returns everything that the columns depend on, ready for JSON."""
        tree = self.tree and [self.tree.names, *self.tree.holds.tolist()]
        return [self.coverage, getattr(self, "least", None), getattr(self, "confident", None), tree]

    def rows(self, probabilities: Tensor) -> dict[str, list[Any]]:
        """(B, C) calibrated probabilities, on CPU -> the columns."""
        table: dict[str, list[Any]] = {}
        if SET in self.columns:
            inside = (probabilities >= self.least).tolist()
            # From the most probable class on
            orders = probabilities.argsort(1, descending=True).tolist()
            table[SET] = [
                [self.classes[index] for index in order if row[index]]
                for order, row in zip(orders, inside, strict=True)
            ]
        if ABSTAIN in self.columns:
            table[ABSTAIN] = (probabilities.amax(1) < self.confident).tolist()
        if self.tree is not None:
            table[NODE], sums = self.tree.lowest(probabilities, self.coverage)
            table[NODE_PROBABILITY] = [round(value, 6) for value in sums]
        return table


def certainty_columns(options: Any) -> list[str]:
    """Returns the names of the columns that options ask for."""
    wanted = {SET: options.coverage, ABSTAIN: options.abstain, NODE: options.class_tree}
    wanted[NODE_PROBABILITY] = options.class_tree
    return [name for name, value in wanted.items() if value is not None]


def set_threshold(of_target: Tensor, coverage: float) -> float:
    """Returns the least probability of a class in a prediction set.

    With N exchangeable images, a set holds the right class with at least this probability: the threshold is that of
    the image of rank ceil((N + 1) coverage), from the most probable one on.

    Args:
        of_target: Calibrated probabilities of the right classes, in ascending order, (N,).
        coverage: Above 0 and below 1.

    >>> set_threshold(torch.linspace(0.1, 0.9, 9), 0.7)
    0.3...
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
    """Returns the confidence below which this share of (N,) images lies, whose confidences ascend."""
    rank = math.floor(len(confidence) * abstain + 1e-9)
    return confidence[rank].item() if rank < len(confidence) else math.inf


def held_out_scores(folder: Path, own: Calibration) -> Scores:
    """Collects the scores of the held-out domains of a sweep's runs, of the method and classes of a calibration.

    Raises:
        ArgumentError: No run fits.
    """
    places = sorted(path for path in folder.glob("**/best") if path.is_dir())
    found = [read_calibration(path / CALIBRATION) for path in places if (path / CALIBRATION).is_file()]
    if not any(len(item.held_out.confidence) for item in found):
        remedy = "holds no calibrated run that held out a domain; calibrate each run"
        raise ArgumentError.of("calibration", str(folder), f"{remedy}: {calibration_command('RUN')}")
    fitting = [item for item in found if (item.method, sorted(item.classes)) == (own.method, sorted(own.classes))]
    if not fitting:
        remedy = f"the model is of {own.method} with {len(own.classes)} classes, and no run is; give the model's sweep"
        raise ArgumentError.of("calibration", str(folder), remedy)
    domains = {name for item in fitting for name in item.held_out_domains}
    others = f"; {len(places) - len(found)} runs are not calibrated" if len(places) > len(found) else ""
    _logger.info(f"calibrated on {len(domains)} held-out domains of {len(fitting)} runs{others}")
    parts = [item.held_out for item in fitting]
    return Scores(*(torch.cat([vars(part)[name] for part in parts]).sort().values for name in vars(parts[0])))


def _read_parents(path: str) -> Mapping[str, str]:
    try:
        check_regular_file(path)
        text = Path(path).read_text(encoding="utf-8-sig")
        if Path(path).suffix.lower() == ".json":
            pairs = json.loads(text, object_pairs_hook=list)
        else:
            pairs = [(row["class"], row["parent"]) for row in csv.DictReader(text.splitlines())]
        if not pairs or not all(isinstance(name, str) and isinstance(parent, str) for name, parent in pairs):
            raise ValueError("a name without a parent")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        remedy = "give a JSON object from names to parents, or a CSV file with the columns class and parent"
        raise DataError(f"class_tree={path!r}: cannot be read ({error!r}); {remedy}") from error
    parents: dict[str, str] = {}
    for name, parent in pairs:
        if parents.setdefault(name, parent) != parent:
            raise ArgumentError.of("class_tree", path, f"{name!r} has two parents, {parents[name]!r} and {parent!r}")
    return parents


def _to_root(path: str, parents: Mapping[str, str], name: str) -> list[str]:
    line = [name]
    while (parent := parents.get(line[-1], "")) != "":
        if parent in line:
            raise ArgumentError.of("class_tree", path, f"{parent!r} is above itself; remove the cycle")
        line.append(parent)
    return line
