"""Records: one row of results.jsonl, written and read with DomainBed's keys.

A row is flat JSON: step, epoch, step_time (seconds), mem_gb, the losses by name, env{i}_in_acc, env{i}_out_acc and
env{i}_out_loss for every domain i of the benchmark, and the run's args (the format's number and versions among them)
and hparams; `averaged` where it is true.
DomainBed's own rows, which have no out-losses, are read as well.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from ..errors import RecordError
from .options import Arguments
from .run_identity import check_format

_SCORE = re.compile(r"env(\d+)_(in_acc|out_acc|out_loss)")
_ARGS = '{"args": '  # which both programs write first, with sorted keys
_DECODER = json.JSONDecoder()
_OWN_KEYS = ("step", "epoch", "step_time", "mem_gb", "args", "hparams")
_NUMBERS = ("step", "epoch", "step_time", "mem_gb")
_PLAIN = frozenset((int, float))
_ROLE_NUMBERS = ("accuracy", "worst_accuracy", "f1_macro")

Score = Literal["accuracy", "worst_accuracy", "f1_macro"]
SCORED_ROLES = ("id", "ood")
OOD_VALIDATION = "ood_val"
VALIDATION_ROLES = {"id_val": ("train", "id"), OOD_VALIDATION: ("ood",)}  # name of the scores -> roles of the domains


class RoleScores(TypedDict, total=False):
    """What `role_scores` measures of the domains of one role; older records, and tables' own, lack some.

    Attributes:
        accuracy: Over images.
        worst_accuracy: Of the worst group.
        worst_group: Its name; None where no group counts.
        f1_macro: Mean F1 score over the classes.
        group_accuracy: Group -> accuracy.
        num_samples: Group -> number of images.
    """

    accuracy: float
    worst_accuracy: float
    worst_group: str | None
    f1_macro: float
    group_accuracy: dict[str, float]
    num_samples: dict[str, int]


@dataclass(frozen=True)
class Record:
    """One evaluation of one run.

    Attributes:
        step: Number of the step that was just taken, from 0.
        epoch: `step` in passes over the smallest in-split of all domains, as DomainBed counts.
        losses: Mean of each loss since the record before.
        step_time: Mean seconds per step since the record before, loading included.
        mem_gb: Peak memory of the accelerator in GiB; 0 on CPU.
        in_acc: Accuracy on each domain's in-split, shares; NaN for an empty split.
        out_acc: Likewise on the out-splits.
        args: The run's arguments, among them dataset, algorithm, test_envs, trial_seed and hparams_seed.
        hparams: The run's hyper-parameters.
        roles: Scores of "id" and "ood" where the benchmark has such domains; see `role_scores`.
        out_loss: Mean cross-entropy on each domain's out-split; empty in DomainBed's rows.
        averaged: Whether this is the averaged network at the end of a run, which then stands for the run alone.
    """

    step: int
    epoch: float
    losses: Mapping[str, float]
    step_time: float
    mem_gb: float
    in_acc: tuple[float, ...]
    out_acc: tuple[float, ...]
    args: Arguments
    hparams: Mapping[str, object]
    roles: Mapping[str, RoleScores] = field(default_factory=dict)
    out_loss: tuple[float, ...] = ()
    averaged: bool = False

    @property
    def test_domains(self) -> tuple[int, ...]:
        """Positions of the domains that were held out."""
        return tuple(self.args["test_envs"])

    @property
    def training_domains(self) -> tuple[int, ...]:
        """Positions of the domains that were trained on."""
        return _others(self.test_domains, len(self.in_acc))

    def to_json(self) -> str:
        """Returns the row as one line of JSON, keys sorted."""
        row: dict[str, object] = {key: getattr(self, key) for key in _OWN_KEYS}
        row |= {**self.losses, **self.scores, **({"roles": self.roles} if self.roles else {})}
        row |= {"averaged": True} if self.averaged else {}
        return json.dumps(row, sort_keys=True)

    @property
    def scores(self) -> dict[str, float]:
        """The numbers of every domain by DomainBed's keys, such as env0_in_acc."""
        columns = {"in_acc": self.in_acc, "out_acc": self.out_acc, "out_loss": self.out_loss}
        domains = range(len(self.in_acc))
        return {f"env{at}_{kind}": column[at] for at in domains for kind, column in columns.items() if column}

    @classmethod
    def from_json(cls, line: str, before: Self | None = None) -> Self:
        """Reads a row.

        Args:
            line: The row, or without its args if a record is given.
            before: Of the same run; its args, which have been checked, and equal hyper-parameters are shared.

        Raises:
            RecordError: The line is no JSON object, lacks what a record needs, or has a field of another type.
            FormatError: It is of another format.
        """
        try:
            row = json.loads(line)
        except RecursionError as error:
            raise RecordError(f"record={_shortened(line)!r}: is nested too deeply to be a record") from error
        except ValueError as error:  # also of numbers with thousands of digits
            raise RecordError(f"record={_shortened(line)!r}: is not JSON ({error}); the line may be cut off") from error
        if not isinstance(row, dict):
            raise RecordError(f"record={_shortened(line)!r}: is not a JSON object")
        row.setdefault("mem_gb", 0.0)  # DomainBed's older rows lack it
        args = None if before is None else before.args
        row = row if args is None else {"args": args, **row}
        missing = [key for key in _OWN_KEYS if key not in row]
        for key in ("args", "hparams", "roles"):
            if not isinstance(row.get(key, {}), dict):
                raise RecordError(f"{key}={_shortened(repr(row[key]))}: is no JSON object; the row is damaged")
        if row.get("args") is not args:
            check_format(row.get("args", {}), f"record={_shortened(line)!r}")
        missing += [f"args[{key!r}]" for key in _NEEDED if key not in row.get("args", {})]
        if missing:
            raise RecordError(f"record={_shortened(line)!r}: lacks {', '.join(missing)}")
        if row["args"] is not args:
            _check_args(row["args"])
        _check_roles(row.get("roles", {}))
        known = {key: row.pop(key) for key in _OWN_KEYS} | {"roles": row.pop("roles", {})}
        known["averaged"] = row.pop("averaged", False)
        if before is not None and repr(known["hparams"]) == repr(before.hparams):
            known["hparams"] = before.hparams
        scores = _pop_scores(row)
        _check_numbers({key: known[key] for key in _NUMBERS} | row)
        return cls(**scores, losses={sys.intern(name): loss for name, loss in row.items()}, **known)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Reads a results.jsonl file.

    Raises:
        RecordError: A line is not a record, or the file is no text; the message gives file and line.
    """
    return list(_iterate(Path(path)))


def _iterate(path: Path) -> Iterator[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: is not UTF-8 text ({error}); give the file that a run wrote") from error
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror}); make it a readable file") from error
    head, record = None, None
    for number, line in enumerate(lines, start=1):
        try:
            record = _alike(line, head, record) or Record.from_json(line)
        except RecordError as error:
            raise RecordError(f"{path}, line {number}: {error}") from error
        head = head if head and line.startswith(head) else _head(line)
        yield record


def _head(line: str) -> str | None:
    """What a row begins with up to its second entry, if the first is its args; all rows of a run begin alike."""
    if not line.startswith(_ARGS):
        return None
    _, end = _DECODER.raw_decode(line, len(_ARGS))
    return line[: end + 2] if line[end : end + 2] == ", " else None


def _alike(line: str, head: str | None, before: Record | None) -> Record | None:
    """Reads a row that begins as the one before it, whose args and hyper-parameters it shares; None of any other."""
    if head is None or before is None or not line.startswith(head):
        return None
    with suppress(RecordError):  # which is better said of the whole line
        return Record.from_json("{" + line[len(head) :], before)
    return None


@lru_cache(maxsize=1024)
def _others(held_out: tuple[int, ...], number: int) -> tuple[int, ...]:
    """Positions of the domains that are not held out; one tuple for all records with the same ones."""
    return tuple(domain for domain in range(number) if domain not in held_out)


def _pop_scores(row: dict[str, Any]) -> dict[str, Any]:
    """Takes the domains' scores out of a row; returns each kind that is there, ordered by domain."""
    columns = _score_columns(tuple(row))
    scores = {kind: tuple(map(row.pop, keys)) for kind, keys in columns.items()}
    for kind, keys in columns.items():
        if not _are_numbers(scores[kind]):
            _check_numbers(dict(zip(keys, scores[kind], strict=True)))
    return scores


@lru_cache(maxsize=64)
def _score_columns(keys: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Kind of score -> its keys, ordered by domain; rows of a run have the same ones."""
    found = {match.group(0): match for match in map(_SCORE.fullmatch, keys) if match}
    number = len({match[1] for match in found.values()})  # not the largest, which may be of any size
    kinds = ("in_acc", "out_acc", "out_loss") if "env0_out_loss" in found else ("in_acc", "out_acc")
    columns = {kind: tuple(f"env{domain}_{kind}" for domain in range(number)) for kind in kinds}
    if not found or {key for column in columns.values() for key in column} != set(found):
        raise RecordError(
            f"scores={_shortened(str(sorted(found)), 400)}: expected env0_in_acc, env0_out_acc, env1_in_acc and so on"
        )
    return columns


def _are_numbers(values: Iterable[object]) -> bool:
    """Whether all are plain ones: millions are looked at, and hardly any is not."""
    return _PLAIN.issuperset(map(type, values))


def _check_numbers(values: Mapping[str, object]) -> None:
    if _are_numbers(values.values()):
        return
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RecordError(f"{key}={_shortened(repr(value))}: is no number; the row is damaged")


def _check_args(args: Arguments) -> None:
    for key, (fits, wanted) in (_NEEDED | _KNOWN).items():
        if not fits(args.get(key)) and not (key in _KNOWN and args.get(key) is None):
            raise RecordError(f"args[{key!r}]={_shortened(repr(args[key]))}: must be {wanted}; the row is damaged")


def _check_roles(roles: Mapping[str, object]) -> None:
    for role, scores in roles.items():
        if not isinstance(scores, dict):
            raise RecordError(f"roles[{role!r}]={_shortened(repr(scores))}: is no JSON object; the row is damaged")
        _check_numbers({key: scores[key] for key in _ROLE_NUMBERS if scores.get(key) is not None})


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _are_positions(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


Field = tuple[Callable[[object], bool], str]  # whether a value fits, and what it must be
_NEEDED: dict[str, Field] = {
    "dataset": (_is_name, "a name"),
    "algorithm": (_is_name, "a name"),
    "test_envs": (_are_positions, "a list of domains' positions"),
    "trial_seed": (_is_whole, "a whole number"),
    "hparams_seed": (_is_whole, "a whole number"),
}
_KNOWN: dict[str, Field] = {
    "model": (_is_name, "a name"),
    "averaging": (_is_name, "a name"),
    "domains": (_are_names, "a list of names"),
}


def _shortened(line: str, length: int = 60) -> str:
    return line if len(line) <= length else line[:length] + "..."
