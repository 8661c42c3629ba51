"""Tables as csv files that spreadsheets show and never obey."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from ..cli.escape import csv_cell


def write_rows(file: TextIO, rows: Iterable[Iterable[object]]) -> None:
    """Writes rows, the header among them, into an open file; texts as `csv_cell` has them."""
    csv.writer(file, lineterminator="\n").writerows(
        [csv_cell(cell).replace("\r", "\n") if isinstance(cell, str) else cell for cell in row]  # \r is not quoted
        for row in rows
    )


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes rows, the header among them, as a file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, rows)
