"""Reading csv files of images, with messages that name the file, the line and the column."""

import csv
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np

from ...errors import DataError

CsvRow = dict[str, str]
SHOWN = 5
LONGEST = 200  # characters of a field in a message
FLOAT32_MAX = float(np.finfo(np.float32).max)

Value = TypeVar("Value")


def read_csv(path: Path, columns: Sequence[str]) -> list[CsvRow]:
    """Reads a csv file with a header.

    Raises:
        DataError: There is no such file, it is empty, or it lacks one of the columns.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows, found = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r}: cannot be read as csv ({error})") from error
    lacking = [column for column in columns if column not in found]
    if lacking:
        raise DataError(f"{str(path)!r}: lacks the columns {', '.join(lacking)}; it has {', '.join(found)}")
    if not rows:
        raise DataError(f"{str(path)!r}: holds a header and no rows")
    return rows


def parsed(path: Path, rows: Sequence[CsvRow], column: str, parse: Callable[[str], Value], wanted: str) -> list[Value]:
    """Parses one column of every row.

    Args:
        path: For the message.
        rows: From `read_csv`.
        column: Which.
        parse: Raises ValueError (or KeyError) on what it does not take; an empty field is refused before it.
        wanted: What a field must be, for the message.

    Raises:
        DataError: Some fields are empty or wrong; the message names their lines, counting the header as line 1.
    """
    values, wrong = [], []
    for line, row in enumerate(rows, start=2):
        text = (row[column] or "").strip()
        try:
            if not text:
                raise ValueError(text)
            values.append(parse(text))
        except (ValueError, KeyError):
            wrong.append(line)
    if wrong:
        fields = [_shortened(rows[line - 2][column]) for line in wrong[:SHOWN]]
        raise DataError(f"{str(path)!r}: column {column!r} is {fields} in {_lines(wrong)}; every row needs {wanted}")
    return values


def coordinates(path: Path, rows: Sequence[CsvRow], longitude: str = "lon", latitude: str = "lat") -> np.ndarray:
    """Reads the coordinates of every row as float32 (N, 2), longitude first; "nan" in both says that they are unknown.

    Raises:
        DataError: A field is empty, no number, or out of range; the message names the lines.
    """
    columns = [
        parsed(path, rows, name, partial(_within, limit), f"degrees in -{limit:g}..{limit:g}, or nan where unknown")
        for name, limit in ((longitude, 180.0), (latitude, 90.0))
    ]
    return np.array(columns, dtype=np.float32).T


def numeric(path: Path, rows: Sequence[CsvRow], columns: Sequence[str]) -> np.ndarray:
    """Reads further metadata, such as a time or a sensor's number, as float32 (N, len(columns)).

    "nan" says that a value is unknown. Seven digits are kept, so that a time is better given in years than in seconds.

    Raises:
        DataError: A column is missing, or a field is empty, infinite or no number; the message names the lines.
    """
    lacking = [column for column in columns if column not in rows[0]]
    if lacking:
        found = ", ".join(rows[0])
        raise DataError(f"{str(path)!r}: lacks the columns {', '.join(lacking)}; it has {found}; name some of these")
    wanted = "a number, or nan where unknown; name another column, or write its values as numbers"
    values = [parsed(path, rows, column, partial(_within, FLOAT32_MAX), wanted) for column in columns]
    return np.array(values, dtype=np.float32).reshape(len(columns), len(rows)).T


def choice(*names: str) -> Callable[[str], str]:
    """A parser that takes these names alone."""
    return {name: name for name in names}.__getitem__


def below(folder: Path) -> Callable[[str], str]:
    """A parser of paths below a folder, which takes none that lead out of it; whether they exist is not looked at."""

    def parse(text: str) -> str:
        if PurePath(text).is_absolute() or ".." in PurePath(text).parts:
            raise ValueError(text)
        return str(folder / text)

    return parse


def number(text: str) -> str:
    """A parser that takes decimal digits alone, and leaves them as they are written."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return text


def _within(limit: float, text: str) -> float:
    value = float(text)
    if not math.isnan(value) and abs(value) > limit:
        raise ValueError(text)
    return value


def _shortened(field: str | None) -> str | None:
    return f"{field[:LONGEST]}..." if field and len(field) > LONGEST else field


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return f"{len(numbers)} lines ({shown}, ...)" if len(numbers) > SHOWN else f"lines {shown}"
