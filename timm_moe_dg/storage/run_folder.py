"""The output folder of a run: args.yaml, results.jsonl, log.txt, checkpoints/, best/, best_oracle/ and lastly done.

Nothing half-made is ever seen under its final name: the folder appears with its first evaluation complete, and folders
in it are written beside the old ones and then put in their place.
"""

import csv
import io
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml

from ..cli.arguments import Arguments
from ..errors import ArgumentError, RecordError
from ..protocols.formats import read_arguments
from ..protocols.records import Record
from ..protocols.run_identity import check_unchanged
from ..protocols.selection import reported_accuracy, training_domain_validation, validation_accuracy
from .atomic import append_line, explained, recovered, replaced, write_text
from .checkpoint import Checkpoints, RunState

BEST = {"training_domain_validation": "best", "oracle": "best_oracle"}  # selection rule -> folder of its network
ARGUMENTS, LOG, DONE = "args.yaml", "log.txt", "done"
_logger = logging.getLogger(__name__)


class RunFolder:
    """Writes what a run finds.

    Args:
        path: The folder. Nothing is created or changed before the first `add`.
        args: The run's arguments, for args.yaml.
        resume: Whether it may hold an unfinished run of these arguments, to go on with or to start afresh; or a
            finished run of fewer steps, to be extended.

    Raises:
        ArgumentError: The folder holds something else.
        FormatError: What it holds is of another format.
    """

    def __init__(self, path: str | os.PathLike[str], args: Arguments, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.args = args
        self.records: list[Record] = []
        self._unlogged = ""
        self._extends = False
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            self._check_occupant(resume)

    @property
    def selected(self) -> Record:
        """The record that training-domain validation picks so far."""
        return training_domain_validation(self.records)

    def newest_checkpoint(self) -> RunState | None:
        """Reads what to go on from; None, and a message if the run had begun, when it starts afresh."""
        checkpoint = cast(RunState | None, self.checkpoints.newest())  # what was written
        if checkpoint is None and self.path.exists():
            _logger.info(f"{self.path} holds no complete checkpoint: starting afresh")
        return checkpoint

    def read_until(self, step: int) -> None:
        """Loads records up to a step, dropping truncated lines."""
        lines = (self.path / "results.jsonl").read_text().splitlines()
        records = [record for record in map(_complete, lines) if record is not None]
        kept = [record for record in records if record.step <= step and not record.averaged]
        steps = {"steps": self.args["steps"]} if self._extends else {}
        self.records = [replace(record, args={**record.args, **steps}) for record in kept]

    def cut_back(self) -> None:
        """Removes from the files what `read_until` left out or was half-written, and the end of a run that goes on."""
        if self._extends:
            (self.path / DONE).unlink()
            write_text(self.path / ARGUMENTS, _yaml(self.args))
        write_text(self.path / "results.jsonl", "".join(record.to_json() + "\n" for record in self.records))
        write_text(self.path / "summary.csv", _table(self.records))
        for name in BEST.values():
            recovered(self.path / name)

    def add(self, record: Record, save: Callable[[Path], None]) -> None:
        """Writes one evaluation.

        Args:
            record: The evaluation.
            save: Writes the network into a folder: best_oracle/, and best/ when the record is the best so far.

        Raises:
            StorageError: Something cannot be written; what was there stays.
        """
        self.records.append(record)
        if len(self.records) == 1:
            with replaced(self.path) as folder:
                (folder / ARGUMENTS).write_text(_yaml(self.args))
                self._append(folder, record)
                save(folder / BEST["training_domain_validation"])
                shutil.copytree(folder / BEST["training_domain_validation"], folder / BEST["oracle"])
            return
        rules = BEST if self.selected is record else ("oracle",)
        for rule in rules:
            with replaced(self.path / BEST[rule]) as folder:
                save(folder)
        self._append(self.path, record)

    def log(self, text: str) -> None:
        """Appends text to log.txt, as soon as there is a folder of this run."""
        self._unlogged += text
        if self.records and self._unlogged:
            with explained(self.path / LOG), (self.path / LOG).open("a") as file:
                file.write(self._unlogged)
            self._unlogged = ""

    def finish(self, *, can_go_on: bool = False) -> None:
        """Marks the run as complete, as DomainBed does, and removes its checkpoints.

        Args:
            can_go_on: Keep the last one, which a run of more steps goes on from.
        """
        if can_go_on:
            self.checkpoints.keep(1)
        write_text(self.path / DONE, "done")
        if not can_go_on:
            shutil.rmtree(self.checkpoints.folder, ignore_errors=True)

    def _append(self, folder: Path, record: Record) -> None:
        append_line(folder / "results.jsonl", record.to_json())
        write_text(folder / "summary.csv", _table(self.records))

    def _check_occupant(self, resume: bool) -> None:
        done, written = (self.path / DONE).exists(), self.path / ARGUMENTS
        recorded = read_arguments(written, "resume") if resume and written.exists() else {}
        self._extends = done and bool(recorded) and self.args["steps"] > recorded["steps"]
        if not recorded or (done and not self._extends):
            state = "a finished run" if done else "files of another run"
            raise ArgumentError.of("output", str(self.path), f"holds {state}; give another --output or --experiment")
        check_unchanged(recorded, {**self.args, **({"steps": recorded["steps"]} if self._extends else {})})


def run_arguments(model: str) -> dict[str, Any]:
    """Returns the arguments of the run that a `local-dir:` model lies in, from args.yaml beside it; empty without one.

    Raises:
        ArgumentError: The file cannot be read as such.
        FormatError: It is of another format.
    """
    source, _, folder = model.partition(":")
    path = Path(folder).parent / ARGUMENTS
    return dict(read_arguments(path, "model")) if source == "local-dir" and path.is_file() else {}


def summary_row(record: Record) -> dict[str, float | bool]:
    """Returns one row of summary.csv."""
    row = {"step": record.step, "epoch": record.epoch, **record.losses, "step_time": record.step_time}
    row |= {"validation_acc": validation_accuracy(record), "test_acc": reported_accuracy(record)}
    return row | record.scores | {"averaged": record.averaged}


def _yaml(args: Arguments) -> str:
    return yaml.safe_dump(dict(args), sort_keys=True)


def _table(records: Sequence[Record]) -> str:
    rows = [summary_row(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _complete(line: str) -> Record | None:
    try:
        return Record.from_json(line)
    except RecordError:
        return None
