"""Tables as csv files that spreadsheets show and never obey."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

_OBEYED = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet takes for a formula


def plain_cell(value: object) -> object:
    """Puts an apostrophe in front of a text that a spreadsheet would compute; numbers stay numbers.

    >>> plain_cell("=1+1"), plain_cell("cat"), plain_cell(-1)
    ("'=1+1", 'cat', -1)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(_OBEYED) else value


def write_rows(file: TextIO, rows: Iterable[Iterable[object]]) -> None:
    """Writes rows, the header among them, into an open file."""
    csv.writer(file, lineterminator="\n").writerows(map(plain_cell, row) for row in rows)


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes rows, the header among them, as a file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, rows)
