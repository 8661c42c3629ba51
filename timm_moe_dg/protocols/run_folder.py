"""The output folder of a run: args.yaml, results.jsonl, summary.csv, best/ and, at the end, done.

Nothing half-made is ever seen under its final name: the folder appears with its first evaluation complete, and best/ is
written beside the old one and then put in its place.
"""

import csv
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ..errors import ArgumentError
from .records import Record
from .selection import reported_accuracy, training_domain_validation, validation_accuracy


class RunFolder:
    """Writes what a run finds.

    Args:
        path: The folder; it must not exist, or be empty. Nothing is created before the first `add`.
        args: The run's arguments, for args.yaml.

    Raises:
        ArgumentError: The folder holds something already.
    """

    def __init__(self, path: str | os.PathLike[str], args: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.args = args
        self.records: list[Record] = []
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            state = "a finished run" if (self.path / "done").exists() else "files of another run"
            raise ArgumentError.of("output", str(self.path), f"holds {state}; give another --output or --experiment")

    @property
    def selected(self) -> Record:
        """The record that training-domain validation picks so far."""
        return training_domain_validation(self.records)

    def add(self, record: Record, save: Callable[[Path], None]) -> None:
        """Writes one evaluation.

        Args:
            record: The evaluation.
            save: Writes the network into a folder; called when the record is the best so far, for best/.
        """
        self.records.append(record)
        if len(self.records) == 1:
            with replaced(self.path) as folder:
                (folder / "args.yaml").write_text(yaml.safe_dump(dict(self.args), sort_keys=True))
                _append(folder, record)
                save(folder / "best")
            return
        _append(self.path, record)
        if self.selected is record:
            with replaced(self.path / "best") as folder:
                save(folder)

    def finish(self) -> None:
        """Marks the run as complete, as DomainBed does."""
        (self.path / "done").write_text("done")


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Gives a fresh folder beside `target` to write into, which takes the place of `target` if nothing is raised.

    A target that an earlier process was killed while replacing is put back first.
    """
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _append(folder: Path, record: Record) -> None:
    with (folder / "results.jsonl").open("a") as file:
        file.write(record.to_json() + "\n")
    row = _summary(record)
    summary = folder / "summary.csv"
    is_new = not summary.exists()
    with summary.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def _summary(record: Record) -> dict[str, float]:
    row = {"step": record.step, "epoch": record.epoch, **record.losses, "step_time": record.step_time}
    row |= {"validation_acc": validation_accuracy(record), "test_acc": reported_accuracy(record)}
    for domain, (inside, outside) in enumerate(zip(record.in_acc, record.out_acc, strict=True)):
        row |= {f"env{domain}_in_acc": inside, f"env{domain}_out_acc": outside}
    return row
