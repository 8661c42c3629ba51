"""summary.csv: the numbers of each evaluation, a row each, for spreadsheets."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from ..protocols.records import Record
from ..protocols.selection import reported_accuracy, validation_accuracy

SUMMARY = "summary.csv"


def summary_row(record: Record) -> dict[str, float | bool]:
    """Returns one row; its columns have the same order for a record that was read back."""
    row = {"step": record.step, "epoch": record.epoch, **dict(sorted(record.losses.items()))}
    row |= {"step_time": record.step_time, "validation_acc": validation_accuracy(record)}
    return row | {"test_acc": reported_accuracy(record)} | record.scores | {"averaged": record.averaged}


def summary_table(records: Sequence[Record]) -> str:
    """Returns the text of the file, with the columns of the first of the records."""
    rows = [summary_row(record) for record in records]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def is_summarized(path: Path, record: Record) -> bool:
    """Whether a summary.csv has exactly the numbers of a record."""
    try:
        rows = list(csv.DictReader(path.read_bytes().decode(errors="replace").splitlines()))
    except (OSError, csv.Error):
        return False
    return {name: str(value) for name, value in summary_row(record).items()} in rows
