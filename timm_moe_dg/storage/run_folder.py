"""The output folder of a run, and the checkpoints in it that the run resumes from.

It holds args.yaml, results.jsonl, summary.csv, log.txt, checkpoints/, best/, and `done` once the run is finished.
--save-rules adds best_oracle/, best_ood_worst_group/ and best_ood_f1_macro/.

Nothing is ever half written under its final name. The folder appears with its first evaluation complete. One process at
a time writes to it, see `files.owned`. A last line of results.jsonl that a kill has cut is dropped on resume.
"""

import csv
import io
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypedDict
from zipfile import ZipFile

import torch
import yaml
from safetensors.torch import save

from ..errors import ArgumentError, CheckpointError, RecordError, StorageError, check_regular_file
from ..networks.calibration import CALIBRATION, Calibration
from ..protocols.options import FURTHER_RULES, Arguments
from ..protocols.records import Record
from ..protocols.run_identity import check_format, check_unchanged, read_arguments, stamp
from ..protocols.selection import (
    SELECTION_RULES,
    selected_scores,
    training_domain_validation,
)
from .files import append_line, explained, recovered, replaced, replaced_file, write_text

# selection rule -> folder of its network
BEST = {"training_domain_validation": "best", **{rule: f"best_{rule}" for rule in FURTHER_RULES}}
ARGUMENTS, RESULTS, SUMMARY, LOG, DONE = "args.yaml", "results.jsonl", "summary.csv", "log.txt", "done"
RETAINED = 2  # checkpoints: if the newest is damaged, there is the one before
_logger = logging.getLogger(__name__)


class RunState(TypedDict):
    """The content of a checkpoint."""

    step: int  # the last one taken
    identity: Arguments  # see `RunPlan.identity`
    shared: Mapping[str, Mapping[str, Any]]  # name -> state that is the same in every process
    per_process: Sequence[Mapping[str, Mapping[str, Any]]]  # of each process, name -> state that may differ


class Checkpoints:
    """The two newest checkpoints of a run, in a folder that is created when the first is saved."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes the checkpoint of a step and prunes to the two newest. An error leaves earlier ones as they are."""
        path = self.folder / f"step-{step:06d}.pt"
        with explained(path):
            # Not its parents: a run folder that was removed must not come back half empty
            self.folder.mkdir(exist_ok=True)
            with replaced_file(path) as fresh:
                _write({**stamp(), "state": state}, fresh)
        self.prune(RETAINED)
        return path

    def prune(self, number: int) -> None:
        """Removes all but the newest, and what a kill has left of others."""
        for path in [*self._paths()[:-number], *self.folder.glob(".step-*.new")]:
            try:
                path.unlink()
            except OSError as error:  # no reason to end a run
                _logger.warning(f"{str(path)!r}: cannot be deleted ({error.strerror}); delete it by hand")

    def newest(self) -> RunState | None:
        """Reads the newest intact checkpoint; None if there is none. Damaged ones are reported."""
        for path in reversed(self._paths()):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                _logger.warning(f"{error}; using the checkpoint before it")
        return None

    def describe(self) -> str:
        """Names the newest checkpoint."""
        return str(self._paths()[-1]) if self._paths() else "none yet"

    def _paths(self) -> list[Path]:
        steps = {path: path.stem.removeprefix("step-") for path in self.folder.glob("step-*.pt")}
        # By number: the alphabet has step-1000000 before step-999999
        return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def read_checkpoint(path: Path) -> RunState:
    """Reads a checkpoint. If it is missing or not as it was written, a `CheckpointError` is raised."""
    try:
        check_regular_file(path)
        # torch.load itself does not notice a flipped bit in a tensor, but the file is a zip archive with checksums
        with ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} differs from its checksum")
        stamped = torch.load(path, map_location="cpu", weights_only=True)
        state = stamped["state"]
    except Exception as error:  # damage raises errors of many kinds
        raise CheckpointError(f"checkpoint={str(path)!r}: is damaged ({_reason(error)})") from error
    check_format(stamped, f"checkpoint={str(path)!r}")
    return state


def _write(content: Mapping[str, object], path: Path) -> None:
    try:
        with path.open("wb") as file:
            torch.save(content, file)
    except RuntimeError as error:
        # torch's writer replaces the system's error, such as a full disk, by its own
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    try:
        # An object that only pickle can read would make the run impossible to resume. mmap reads no tensors.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        remedy = "a state may hold tensors, numbers, texts and containers of them"
        raise CheckpointError(f"checkpoint={str(path)!r}: cannot be read back ({_reason(error)}); {remedy}") from error


def _reason(error: Exception) -> str:
    """The cause in one line, without torch's advice to load the file unprotected."""
    cause = str(error).rpartition("WeightsUnpickler error: ")[2].partition(" Please use")[0]
    return cause.strip().partition("\n")[0]


class RunFolder:
    """Writes the results of a run. Nothing is created or changed before the first `add`.

    With `resume` the folder may hold a run with these arguments: an unfinished one, or a finished one that took fewer
    steps. Anything else in it raises an `ArgumentError`.
    """

    def __init__(self, path: str | os.PathLike[str], args: Arguments, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.args = args
        self.records: list[Record] = []
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self._resume = resume
        self._extends = False
        if self._is_occupied():
            self._check_occupant()

    @property
    def selected(self) -> Record:
        """The record that training-domain validation selects so far."""
        return training_domain_validation(self.records)

    def newest_checkpoint(self) -> RunState | None:
        """Reads the newest intact checkpoint. If a run without one exists, a message says that it starts afresh."""
        checkpoint = self.checkpoints.newest()
        if checkpoint is None and self.path.exists():
            _logger.info(f"{self.path} holds no complete checkpoint: starting afresh")
        return checkpoint

    def read_back(self, step: int) -> None:
        """Loads the evaluations up to the step of a checkpoint."""
        # The average is evaluated at the end, after all steps
        kept_records = [record for record in self._complete_records() if record.step <= step and not record.averaged]
        if not kept_records:
            remedy = "start another run with --experiment"
            raise RecordError(f"{self.path / RESULTS}: holds no evaluation up to step {step}; {remedy}")
        # A run that is extended has another length than when its first records were written
        length = {name: self.args[name] for name in ("steps", "epochs", "filled_in") if name in self.args}
        self.records = [replace(record, args={**record.args, **length}) for record in kept_records]

    def cut_back(self) -> None:
        """Removes everything after the checkpoint from the files, and half-written folders."""
        if self._extends:
            (self.path / DONE).unlink()
            write_text(self.path / ARGUMENTS, _yaml(self.args))
        write_text(self.path / RESULTS, "".join(record.to_json() + "\n" for record in self.records))
        write_text(self.path / SUMMARY, summary_table(self.records))
        for name in BEST.values():
            recovered(self.path / name)

    def add(self, record: Record, save: Callable[[Path], None]) -> None:
        """Writes one evaluation. An error leaves existing files unchanged.

        `save` writes the network into a folder. It is called for the folder of each saved rule that now selects this
        record.
        """
        self.records.append(record)
        if len(self.records) == 1:
            self._begin(record, save)
            return
        # Networks go first: after a kill in between, the evaluation is repeated and writes them again
        for rule in self._selecting(record):
            with replaced(self.path / BEST[rule]) as folder:
                save(folder)
        self._append(self.path, record)

    def finish(self, *, can_go_on: bool = False) -> None:
        """Marks the run as finished with the file `done`, as DomainBed does, and removes its checkpoints.

        With `can_go_on` the last checkpoint stays, for a run of more steps.
        """
        if can_go_on:
            self.checkpoints.prune(1)
        write_text(self.path / DONE, "done\n")
        if not can_go_on:
            shutil.rmtree(self.checkpoints.folder, ignore_errors=True)

    def _begin(self, record: Record, save: Callable[[Path], None]) -> None:
        """Writes the whole folder with its first evaluation."""
        # The lock keeps out other runs, but not other programs, whose files would be replaced
        if not self._resume and self._is_occupied():
            remedy = "was filled by something else while the run was starting; start it again with another --experiment"
            raise StorageError(f"output={str(self.path)!r}: {remedy}")
        first, *others = (BEST[rule] for rule in self._selecting(record))
        with replaced(self.path) as folder:
            (folder / ARGUMENTS).write_text(_yaml(self.args))
            self._append(folder, record)
            save(folder / first)
            for name in others:
                shutil.copytree(folder / first, folder / name)

    def _selecting(self, newest: Record) -> list[str]:
        """Saved rules that select the newest record. Runs of earlier versions have folders of all rules."""
        rules, saved = [], ("training_domain_validation", *(self.args.get("save_rules") or ()))
        for rule in (rule for rule, name in BEST.items() if rule in saved or (self.path / name).exists()):
            with suppress(RecordError):  # the data has no such validation
                # In one run, test-domain validation selects the last record
                is_last = rule == "oracle" and newest.test_domains
                selected = newest if is_last else SELECTION_RULES[rule](self.records)
                if selected is newest:
                    rules.append(rule)
        return rules

    def _is_occupied(self) -> bool:
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    def _append(self, folder: Path, record: Record) -> None:
        append_line(folder / RESULTS, record.to_json())
        write_text(folder / SUMMARY, summary_table(self.records))

    def _complete_records(self) -> list[Record]:
        """Reads results.jsonl without a last line that a kill has cut."""
        path = self.path / RESULTS
        try:
            check_regular_file(path)
            # Lines are written with their break at the end, so text after the last break is cut
            lines = path.read_bytes().split(b"\n")[:-1]
            return [Record.from_json(line.decode()) for line in lines]
        except (OSError, UnicodeDecodeError, RecordError) as error:
            remedy = "restore the file, or start another run with --experiment"
            raise RecordError(f"{path}: cannot be read ({error}); {remedy}") from error

    def _check_occupant(self) -> None:
        finished, path = (self.path / DONE).exists(), self.path / ARGUMENTS
        recorded = read_arguments(path, "resume") if self._resume and path.exists() else {}
        self._extends = bool(recorded) and finished and self.args["steps"] > recorded["steps"]
        if not recorded or (finished and not self._extends):
            state = "a finished run" if finished else "files of another run"
            raise ArgumentError.of("output", str(self.path), f"holds {state}; give another --output or --experiment")
        check_unchanged(recorded, {**self.args, **({"steps": recorded["steps"]} if self._extends else {})})


def run_arguments(model: str) -> dict[str, Any]:
    """Returns the arguments of the run that a `local-dir:` model belongs to; an empty table if there is no such run."""
    source, _, folder = model.partition(":")
    path = Path(folder).parent / ARGUMENTS
    return dict(read_arguments(path, "model")) if source == "local-dir" and path.is_file() else {}


def warn_of_unfinished(model: str) -> None:
    """Logs that a `local-dir:` model is the best network so far of a run that has not finished."""
    source, _, place = model.partition(":")
    folder = Path(place).parent
    if source == "local-dir" and (folder / ARGUMENTS).is_file() and not (folder / DONE).exists():
        remedy = f"finish it with --resume {folder}"
        _logger.warning(f"model={model!r}: the run has not finished, and this is its best network so far; {remedy}")


def save_calibration(calibration: Calibration, folder: Path) -> None:
    """Writes the file of a calibration into the folder of its network, as a whole or not at all."""
    path = folder / CALIBRATION
    with explained(path), replaced_file(path) as fresh:
        fresh.write_bytes(save(calibration.tensors(), calibration.header()))
    scores = calibration.validation
    _logger.info(f"temperature {calibration.temperature:.3f}, fitted on {len(scores.confidence)} validation images")


def summary_row(record: Record) -> dict[str, float | bool]:
    """Returns the numbers of an evaluation by column of summary.csv."""
    row = {"step": record.step, "epoch": record.epoch, **dict(sorted(record.losses.items()))}
    row |= {"step_time": record.step_time, **selected_scores(record)}
    return row | record.scores | {"averaged": record.averaged}


def summary_table(records: Sequence[Record]) -> str:
    """Formats summary.csv, one row for each evaluation, with the columns of the first."""
    rows = [summary_row(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _yaml(args: Arguments) -> str:
    return yaml.safe_dump(dict(args), sort_keys=True)
