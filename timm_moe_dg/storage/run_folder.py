"""The output folder of a run: args.yaml, results.jsonl, log.txt, checkpoints/, best/, best_oracle/ and lastly done.

Of data with a validation split under shift there are best_ood_worst_group/ and best_ood_f1_macro/ besides.

Nothing half-made is ever seen under its final name: the folder appears with its first evaluation complete, and folders
in it are written beside the old ones and then put in their place. Networks and checkpoints have checksums beside them,
each checkpoint a copy of the evaluations before it, and `done` says what the finished run vouches for.
"""

import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import yaml

from ..errors import ArgumentError, RecordError, StorageError
from ..protocols.options import Arguments
from ..protocols.records import Record
from ..protocols.run_identity import check_unchanged, read_arguments
from ..protocols.selection import (
    OOD_RULES,
    SELECTION_RULES,
    training_domain_validation,
)
from .atomic import append_line, explained, recovered, replaced, write_text
from .checkpoint import Checkpoints, RunState
from .checksums import write_checksums
from .outcome import DONE, lost, vouch
from .reopening import RESULTS, kept_records, needs_remaking
from .summary_table import SUMMARY, summary_table
from .watch import Watch

# selection rule -> folder of its network
BEST = {
    "training_domain_validation": "best",
    "oracle": "best_oracle",
    **{rule: f"best_{rule}" for rule in OOD_RULES},
}
ARGUMENTS, LOG = "args.yaml", "log.txt"
_logger = logging.getLogger(__name__)


class RunFolder:
    """Writes what a run finds.

    Args:
        path: The folder. Nothing is created or changed before the first `add`.
        args: The run's arguments, for args.yaml.
        resume: Whether it may hold an unfinished run of these arguments, to go on with or to start afresh; or a
            finished run, of fewer steps to be extended, or one that has lost something, to be mended.
        verify: Whether the files of a finished run, and the networks of one to go on with, are compared with their
            checksums.

    Attributes:
        records: The evaluations so far.
        missing: Names of the folders whose network is lost, until there is a better one.

    Raises:
        ArgumentError: The folder holds something else.
        FormatError: What it holds is of another format.
    """

    def __init__(
        self, path: str | os.PathLike[str], args: Arguments, *, resume: bool = False, verify: bool = True
    ) -> None:
        self.path = Path(path)
        self.args = args
        self.records: list[Record] = []
        self.missing: set[str] = set()
        self._unlogged = ""
        self._reopens = False
        self._resumed = resume
        self._verify = verify
        self._watch = Watch(self.path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        if self._is_occupied():
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

    def read_back(self, checkpoint: RunState) -> None:
        """Loads the evaluations up to a checkpoint; see `reopening.kept_records`."""
        self.records = kept_records(self.path, checkpoint, self.args["steps"])

    def cut_back(self) -> None:
        """Removes from the files what `read_back` left out or was half-written, and the end of a run that goes on."""
        if self._reopens:
            (self.path / DONE).unlink()
            write_text(self.path / ARGUMENTS, _yaml(self.args))
        write_text(self.path / RESULTS, "".join(record.to_json() + "\n" for record in self.records))
        write_text(self.path / SUMMARY, summary_table(self.records))
        for name in BEST.values():
            recovered(self.path / name)
        self._watch.note(ARGUMENTS, RESULTS, SUMMARY, *BEST.values())

    def lost_networks(self) -> dict[str, int]:
        """Finds the networks that stand for the run so far and are not there, or not what was written.

        Returns:
            Name of the folder -> step of the network; `missing` is these from now on.
        """
        steps = {BEST[rule]: record.step for rule, record in self._standing().items()}
        found = {n: step for n, step in steps.items() if needs_remaking(self.path / n, self._verify)}
        self.missing = set(found)
        return found

    def put(self, name: str, save: Callable[[Path], None]) -> None:
        """Replaces the network in one of the folders of `BEST`."""
        self._watch.check()
        with replaced(self.path / name) as folder:
            _save(save, folder)
        self._watch.note(name)
        self.missing.discard(name)

    def save_checkpoint(self, state: RunState) -> None:
        """Writes what the run can be resumed from, with a copy of the evaluations so far.

        Raises:
            StorageError: It cannot be written, or something else has changed the folder.
        """
        self.check()
        self.checkpoints.save(state["step"], {**state, "records": [record.to_json() for record in self.records]})

    def check(self) -> None:
        """Makes sure that the folder is as this process left it; see `Watch`.

        Raises:
            StorageError: It is not.
        """
        self._watch.check()

    def add(self, record: Record, save: Callable[[Path], None]) -> None:
        """Writes one evaluation.

        Args:
            record: The evaluation.
            save: Writes the network into a folder: best_oracle/, and those of the rules by which the record is the best
                so far.

        Raises:
            StorageError: Something cannot be written; what was there stays.
        """
        self._watch.check()
        self.records.append(record)
        if len(self.records) == 1:
            self._begin(record, save)
            return
        for rule in self._selecting(record):
            self.put(BEST[rule], save)
        self._append(self.path, record)
        self._watch.note(RESULTS, SUMMARY)

    def log(self, text: str) -> None:
        """Appends text to log.txt, as soon as there is a folder of this run."""
        self._unlogged += text
        if self.records and self._unlogged and self.path.is_dir():  # if it vanished, the next write says so
            with explained(self.path / LOG), (self.path / LOG).open("a") as file:
                file.write(self._unlogged)
            self._unlogged = ""

    def finish(self, *, can_go_on: bool = False) -> None:
        """Marks the run as complete, as DomainBed does, and removes its checkpoints.

        Args:
            can_go_on: Keep the last one, which a run of more steps goes on from.

        Raises:
            StorageError: Something else has changed the folder, or it cannot be written.
        """
        self._watch.check()
        if can_go_on:
            self.checkpoints.keep(1)
        names = [BEST[rule] for rule in self._standing() if BEST[rule] not in self.missing]
        vouch(self.path, (ARGUMENTS, RESULTS, SUMMARY), names)
        if not can_go_on:
            shutil.rmtree(self.checkpoints.folder, ignore_errors=True)

    def _begin(self, record: Record, save: Callable[[Path], None]) -> None:
        """Writes the whole folder with its first evaluation."""
        if not self._resumed and self._is_occupied():
            remedy = "was filled by something else while the run was starting; start it again with another --experiment"
            raise StorageError(f"output={str(self.path)!r}: {remedy}")
        first, *others = (BEST[rule] for rule in self._selecting(record))
        with replaced(self.path) as folder:
            (folder / ARGUMENTS).write_text(_yaml(self.args))
            self._append(folder, record)
            _save(save, folder / first)
            for name in others:
                shutil.copytree(folder / first, folder / name)
        self._watch.note(ARGUMENTS, RESULTS, SUMMARY, *BEST.values())

    def _standing(self) -> dict[str, Record]:
        """Rule of `BEST` -> the record that stands for the run so far; without those that the data does not have."""
        found = {}
        for rule in BEST:
            with suppress(RecordError):  # the data has no such validation
                found[rule] = self.records[-1] if rule == "oracle" else SELECTION_RULES[rule](self.records)
        return found

    def _selecting(self, newest: Record) -> list[str]:
        """Rules of `BEST` by which the newest record stands for the run so far."""
        return [rule for rule, record in self._standing().items() if record is newest]

    def _is_occupied(self) -> bool:
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    def _append(self, folder: Path, record: Record) -> None:
        append_line(folder / RESULTS, record.to_json())
        write_text(folder / SUMMARY, summary_table(self.records))

    def _check_occupant(self, resume: bool) -> None:
        done, written = (self.path / DONE).exists(), self.path / ARGUMENTS
        recorded = read_arguments(written, "resume") if resume and written.exists() else {}
        extends = bool(recorded) and done and self.args["steps"] > recorded["steps"]
        self._reopens = extends or (bool(recorded) and done and self._verify and lost(self.path) is not None)
        if not recorded or (done and not self._reopens):
            state = "a finished run" if done else "files of another run"
            raise ArgumentError.of("output", str(self.path), f"holds {state}; give another --output or --experiment")
        check_unchanged(recorded, {**self.args, **({"steps": recorded["steps"]} if extends else {})})


def run_arguments(model: str) -> dict[str, Any]:
    """Returns the arguments of the run that a `local-dir:` model lies in, from args.yaml beside it; empty without one.

    Raises:
        ArgumentError: The file cannot be read as such.
        FormatError: It is of another format.
    """
    source, _, folder = model.partition(":")
    path = Path(folder).parent / ARGUMENTS
    return dict(read_arguments(path, "model")) if source == "local-dir" and path.is_file() else {}


def _yaml(args: Arguments) -> str:
    return yaml.safe_dump(dict(args), sort_keys=True)


def _save(save: Callable[[Path], None], folder: Path) -> None:
    save(folder)
    write_checksums(folder)
