"""The output folder of a run.

It holds args.yaml, results.jsonl, summary.csv, log.txt, checkpoints/, best/, best_oracle/, and `done` once the run is
finished. Data with a validation split under shift adds best_ood_worst_group/ and best_ood_f1_macro/.

Nothing is ever half written under its final name. The folder appears with its first evaluation complete. One process at
a time writes to it, see `ownership`. A last line of results.jsonl that a kill has cut is dropped on resume.
"""

import csv
import io
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml

from ..cli.values import LOCAL
from ..data import Domain
from ..data.domains import listed
from ..data.inspection import Fingerprint
from ..errors import ArgumentError, MoeDgError, RecordError, StorageError, check_regular_file
from ..protocols.evaluation import recognize
from ..protocols.options import DEFAULTS, SPLITTING, Arguments
from ..protocols.records import Record
from ..protocols.run_identity import check_unchanged, read_arguments
from ..protocols.selection import (
    OOD_RULES,
    SELECTION_RULES,
    headline_accuracy,
    training_domain_validation,
    validation_accuracy,
)
from .atomic import append_line, recovered, replaced, write_text
from .checkpoint import Checkpoints, RunState

# selection rule -> folder of its network
BEST = {"training_domain_validation": "best", "oracle": "best_oracle", **{rule: f"best_{rule}" for rule in OOD_RULES}}
ARGUMENTS, RESULTS, SUMMARY, LOG, DONE = "args.yaml", "results.jsonl", "summary.csv", "log.txt", "done"
_logger = logging.getLogger(__name__)


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
        checkpoint = cast(RunState | None, self.checkpoints.newest())
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

        `save` writes the network into a folder. It is called for best_oracle/, and for the folder of each rule that now
        selects this record.
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
        """Rules of `BEST` that select the newest record."""
        rules = []
        for rule in BEST:
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


def warn_of_seen_images(args: Arguments, domains: Sequence[Domain], digests: Fingerprint) -> None:
    """Logs images of test domains and validation that the run has trained on whose network this one starts from."""
    start, file = {}, args["initial_checkpoint"]
    if not (file or args["pretrained"]):
        return
    with suppress(MoeDgError):  # args.yaml of something else
        start = run_arguments(f"{LOCAL}{Path(file).resolve().parent}" if file else args["model"])
    known = recognize(start, domains, digests) or ()
    trained = [index for index, domain in enumerate(known) if domain.trained and not domain.changed]
    if tested := [domains[index].name for index in trained if index in args["test_domains"]]:
        _logger.warning(f"the weights to start from were trained on {listed(tested)}, which this run holds out")
    different = [name for name in SPLITTING if args[name] != start.get(name, DEFAULTS[name])]
    if different and (validating := [domains[index].name for index in trained if index not in args["test_domains"]]):
        remark = f"images of {listed(validating)} that validate here ({', '.join(different)} differs)"
        _logger.warning(f"the weights to start from were trained on {remark}")


def summary_row(record: Record) -> dict[str, float | bool]:
    """Returns the numbers of an evaluation by column of summary.csv."""
    row = {"step": record.step, "epoch": record.epoch, **dict(sorted(record.losses.items()))}
    row |= {"step_time": record.step_time, "validation_acc": validation_accuracy(record)}
    row["test_acc"] = headline_accuracy(record)
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
