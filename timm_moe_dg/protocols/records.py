"""Records of evaluations: the rows of results.jsonl, with DomainBed's keys.

A row is flat JSON. Its keys are step, epoch, step_time (seconds), mem_gb, the losses by name, args, hparams, and for
every domain i of the benchmark env{i}_in_acc, env{i}_out_acc and env{i}_out_loss. Some rows have roles, metrics or
averaged as well. DomainBed's own rows, which lack out-losses, can be read too.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from ..cli.values import Kind, fits
from ..errors import RecordError, check_regular_file
from ..metrics import Metric, independent_number
from .options import Arguments, mistyped
from .run_identity import check_format

Score = Literal["accuracy", "worst_accuracy", "f1_macro", "balanced_accuracy"]
SplitName = Literal["in", "out", "whole"]
SCORED_ROLES = ("id", "ood")
OOD_VALIDATION = "ood_val"
VALIDATION_ROLES = {"id_val": ("train", "id"), OOD_VALIDATION: ("ood",)}  # name of the scores -> roles of the domains

PARTS: Mapping[SplitName, slice] = {"in": slice(0, 1), "out": slice(1, 2), "whole": slice(0, 2)}
_SCORE = re.compile(r"(env\d+)_(in_acc|out_acc|out_loss)")
_NUMBER: Kind = int | float
_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys(("step", "epoch", "step_time", "mem_gb"), _NUMBER),
    **dict.fromkeys(("args", "hparams"), dict),
}
_ARGS: Mapping[str, Kind] = {
    **dict.fromkeys(("dataset", "algorithm"), str),
    **dict.fromkeys(("trial_seed", "hparams_seed"), int),
    "test_envs": [int],
}
_OPTIONAL_ARGS: Mapping[str, Kind] = {
    "domains": [str],
    "average_of": [str],
    "average_method": str,
    "split_sizes": [[int]],  # numbers of images in both splits of each domain
    "most_frequent": [[int]],  # of these, images of the class that training images have most often
    "most_frequent_class": str,
    "classes_present": [[int]],  # numbers of classes with images in both splits and in the whole domain
    "group_squares": [[int]],  # sums over groups of images of (number of images)^2 in both splits
    "reported_split": str,
    "domain_facts": [[str]],  # role, group and split of each domain
    "versions": dict,
}
_SCORES: Mapping[str, Kind] = dict.fromkeys(("accuracy", "worst_accuracy", "f1_macro"), _NUMBER)
_OPTIONAL_SCORES: Mapping[str, Kind] = {
    **dict.fromkeys(("group_accuracy", "num_samples"), dict),
    "worst_group": str,
    "balanced_accuracy": _NUMBER,
}


class RoleScores(TypedDict, total=False):
    """Scores of the domains of one role, as `role_scores` computes them. Tables use a part of the keys."""

    accuracy: float  # over images
    worst_accuracy: float
    worst_group: str | None  # None if there are no groups
    f1_macro: float
    balanced_accuracy: float  # of runs with this metric
    group_accuracy: dict[str, float]
    num_samples: dict[str, int]  # group -> number of images


@dataclass(frozen=True)
class Record:
    """One evaluation of one run."""

    step: int  # number of the step before the evaluation, from 0
    epoch: float  # `step` in passes over the smallest training domain; DomainBed's rows count test domains as well
    losses: Mapping[str, float]  # mean of each loss since the last record
    step_time: float  # mean seconds per step since the last record, loading included
    mem_gb: float  # peak memory of the accelerator in GiB; 0 on CPU
    in_acc: tuple[float, ...]  # accuracy on each domain's in-split, from 0 to 1; NaN for an empty split
    out_acc: tuple[float, ...]  # on each domain's out-split, likewise
    args: Arguments  # of the run, among them dataset, algorithm, test_envs, trial_seed and hparams_seed
    hparams: Mapping[str, object]  # of the run
    roles: Mapping[str, RoleScores] = field(default_factory=dict)  # of "id" and "ood" domains; see `role_scores`
    out_loss: tuple[float, ...] = ()  # mean cross-entropy on each domain's out-split; empty in DomainBed's rows
    metrics: Mapping[str, Sequence[float]] = field(default_factory=dict)  # see `evaluation.class_scores_by_domain`
    averaged: bool = False  # evaluates the averaged network at the end of a run; selection uses this record alone

    @property
    def test_domains(self) -> tuple[int, ...]:
        """Positions of the domains that were held out."""
        return tuple(self.args["test_envs"])

    @property
    def training_domains(self) -> tuple[int, ...]:
        """Positions of the domains that were trained on."""
        return tuple(domain for domain in range(len(self.in_acc)) if domain not in self.args["test_envs"])

    @property
    def metric(self) -> Metric:
        """The score by which the run is selected and reported, a name in `metrics.METRICS`."""
        return self.args.get("metric", "accuracy")

    @property
    def reported_split(self) -> SplitName:
        """The part of test domains that is reported: "whole" for data of the user, "in" for benchmarks."""
        return self.args.get("reported_split", "in")

    def scores_on(self, split: SplitName, metric: str | None = None) -> Sequence[float]:
        """Returns a score of each domain, on a split or on the whole domain; NaN without images, or if not recorded.

        The score is by `metric`, by default the run's. It may be any that `evaluation.class_scores_by_domain` names.

        Records without numbers of images, such as DomainBed's, are weighted by the shares of `holdout_fraction`. The
        out-split is rounded down to whole images, so the error is at most the difference of the splits' accuracies
        divided by the number of images. Without numbers, a split by photograph has no shares, and the result is NaN.
        """
        metric = metric or self.metric
        if metric != "accuracy":
            return self.metrics.get(metric if split == "in" else f"{split}_{metric}", [nan] * len(self.in_acc))
        if split != "whole":
            return self.in_acc if split == "in" else self.out_acc
        share = nan if self.args.get("split_by_photograph") else self.args.get("holdout_fraction", 0.2)
        sizes = self.args.get("split_sizes") or [(1 - share, share)] * len(self.in_acc)
        return [_weighted(pair, size) for *pair, size in zip(self.in_acc, self.out_acc, sizes, strict=True)]

    def images(self, domains: Iterable[int], split: SplitName = "in") -> int | None:
        """Number of images in a part of domains; None in DomainBed's rows, which lack it."""
        sizes = self.args.get("split_sizes")
        return None if sizes is None else sum(sum(sizes[domain][PARTS[split]]) for domain in domains)

    def independent_images(self, domains: Sequence[int], split: SplitName = "in") -> float | None:
        """Returns `metrics.independent_number` of the images of `images`, with --group-column; else None."""
        squares, number = self.args.get("group_squares"), self.images(domains, split)
        if not squares or not number:
            return None
        return independent_number(number, [sum(squares[domain][PARTS[split]]) for domain in domains])

    @property
    def scores(self) -> dict[str, float]:
        """The numbers of every domain by DomainBed's keys, such as env0_in_acc."""
        columns = {"in_acc": self.in_acc, "out_acc": self.out_acc, "out_loss": self.out_loss}
        domains = range(len(self.in_acc))
        return {
            f"env{domain}_{kind}": column[domain] for domain in domains for kind, column in columns.items() if column
        }

    def to_json(self) -> str:
        """Returns the row as one line of JSON, with sorted keys."""
        row: dict[str, object] = {name: getattr(self, name) for name in _FIELDS}
        further = {"roles": self.roles, "metrics": self.metrics, "averaged": self.averaged}
        row |= {**self.losses, **self.scores, **{name: value for name, value in further.items() if value}}
        return json.dumps(row, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Reads a row. A line that is not a record raises a `RecordError`, and another format a `FormatError`."""
        row = _parse(line)
        row.setdefault("mem_gb", 0.0)  # DomainBed's older rows lack it
        _check(row, _FIELDS)
        args = row["args"]
        check_format(args, f"record={_shortened(line)!r}")
        _check(args, _ARGS, _OPTIONAL_ARGS)
        if wrong := mistyped(args):
            raise RecordError(f"args: {wrong}; the row is damaged")
        fields = {name: row.pop(name) for name in _FIELDS}
        tables = {name: row.pop(name, {}) for name in ("roles", "metrics")}
        fields["averaged"] = row.pop("averaged", False)
        _check_values(tables, dict)
        _check_values(tables["metrics"], [_NUMBER])
        _check_values(tables["roles"], dict)
        for scores in tables["roles"].values():
            _check(scores, _SCORES, _OPTIONAL_SCORES)
            for name in ("group_accuracy", "num_samples"):
                _check_values(scores.get(name, {}), _NUMBER)
        _check_values(row, _NUMBER)
        columns = _pop_scores(row)
        domains = len(columns["in_acc"])
        if any(len(scores) != domains for scores in tables["metrics"].values()):
            raise RecordError("metrics: must have a number for each domain; the row is damaged")
        for name, parts in {"split_sizes": 2, "most_frequent": 2, "classes_present": 3, "group_squares": 2}.items():
            numbers = args.get(name)
            if numbers is not None and [len(row) for row in numbers] != [parts] * domains:
                raise RecordError(f"{name}: must have {parts} numbers for each domain; the row is damaged")
        metric = args.get("metric", "accuracy")
        if metric != "accuracy" and not {metric, f"out_{metric}", f"whole_{metric}"} <= tables["metrics"].keys():
            raise RecordError(f"metrics: lacks the run's metric {_shortened(metric)}; the row is damaged")
        if unknown := [domain for domain in args["test_envs"] if not 0 <= domain < domains]:
            raise RecordError(f"test_envs: there is no domain {unknown[0]}; the row is damaged")
        return cls(**fields, **columns, **tables, losses=row)


def read_records(path: str | os.PathLike[str], *, unfinished: bool = False) -> list[Record]:
    """Reads a results.jsonl file. A `RecordError` gives file and line.

    An `unfinished` run may be writing its last line, so this line is left out if it is no record.
    """
    path = Path(path)
    try:
        check_regular_file(path)
        lines = path.read_text(encoding="utf-8", errors="replace" if unfinished else "strict").splitlines()
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: is not UTF-8 text ({error}); give the file that a run wrote") from error
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}); make it a readable file") from error
    records: list[Record] = []
    last_args = ""
    for number, line in enumerate(lines, start=1):
        try:
            record = Record.from_json(line)
        except RecordError as error:
            if unfinished and number == len(lines):
                break
            raise RecordError(f"{path}, line {number}: {error}") from error
        # The rows of a run repeat its arguments, which would take most of the memory
        args = repr(record.args)
        records.append(replace(record, args=records[-1].args) if args == last_args else record)
        last_args = args
    return records


def _parse(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise RecordError(f"record={_shortened(line)!r}: is nested too deeply to be a record") from error
    except ValueError as error:  # invalid JSON, or a number with thousands of digits
        raise RecordError(f"record={_shortened(line)!r}: is not JSON ({error}); the line may be cut off") from error
    if not isinstance(row, dict):
        raise RecordError(f"record={_shortened(line)!r}: is not a JSON object")
    return row


def _check(
    values: Mapping[str, object], required: Mapping[str, Kind], optional: Mapping[str, Kind] | None = None
) -> None:
    """Checks the types of a table's values; optional ones may be missing or None."""
    if missing := [name for name in required if name not in values]:
        raise RecordError(f"lacks {', '.join(missing)}; the row is damaged")
    given = {name: kind for name, kind in (optional or {}).items() if values.get(name) is not None}
    for name, kind in {**required, **given}.items():
        if not fits(values[name], kind):
            raise RecordError(f"{name}={_shortened(repr(values[name]))}: has another type; the row is damaged")


def _check_values(values: Mapping[str, object], kind: Kind) -> None:
    _check(values, dict.fromkeys(values, kind))


def _pop_scores(row: dict[str, float]) -> dict[str, Any]:
    """Takes the domains' scores out of a row; returns each kind that is there, ordered by domain."""
    names = {match[0]: match[1] for match in map(_SCORE.fullmatch, row) if match}
    # By their number: a damaged name can have an index of any size
    domains = range(len(set(names.values())))
    kinds = ("in_acc", "out_acc", "out_loss") if "env0_out_loss" in names else ("in_acc", "out_acc")
    columns = {kind: [f"env{domain}_{kind}" for domain in domains] for kind in kinds}
    if not names or {name for column in columns.values() for name in column} != names.keys():
        raise RecordError(
            f"scores={_shortened(str(sorted(names)), 400)}: expected env0_in_acc, env0_out_acc, env1_in_acc and so on"
        )
    return {kind: tuple(map(row.pop, column)) for kind, column in columns.items()}


def _weighted(accuracies: Sequence[float], sizes: Sequence[float]) -> float:
    """The mean of the splits that have an accuracy, weighted by their sizes."""
    present = [(accuracy, size) for accuracy, size in zip(accuracies, sizes, strict=True) if not isnan(accuracy)]
    if len(present) == 1:
        return present[0][0]
    total = sum(size for _, size in present)
    return sum(accuracy * size for accuracy, size in present) / total if total else nan


def _shortened(line: str, length: int = 60) -> str:
    return line if len(line) <= length else line[:length] + "..."
