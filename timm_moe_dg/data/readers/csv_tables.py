"""Reading csv files of images, with messages that name the file, the line and the column."""

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from ...errors import DataError, check_regular_file

Columns: TypeAlias = Mapping[str, Sequence[str]]  # the fields of each column, by its name
MAX_LISTED = 5  # lines and fields in a message
MAX_FIELD_LENGTH = 200  # characters of a field in a message
FLOAT32_MAX = float(np.finfo(np.float32).max)

Value = TypeVar("Value")


def read_csv(path: Path, required: Sequence[str]) -> Columns:
    """Reads a csv file with a header into one list per column. Empty lines are skipped, short lines filled up."""
    try:
        check_regular_file(path)
        # utf-8-sig skips the byte order mark that spreadsheets write.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            header = list(reader.fieldnames or [])
            columns: dict[str, list[str]] = {name: [] for name in header}
            if doubled := [name for name in columns if name and header.count(name) > 1]:
                raise DataError(f"{str(path)!r}: line 1 names the column {doubled[0]!r} twice; rename or remove one")
            for row in reader:
                if None in row:  # fields beyond the last column
                    raise DataError(
                        f"{str(path)!r}: line {reader.line_num} has {len(header) + len(row[None])} fields for "
                        f"{len(header)} columns; write numbers with a point, and texts that hold a comma in quotes"
                    )
                for name, fields in columns.items():
                    fields.append(row[name])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r}: cannot be read as csv ({error})") from error
    missing = [name for name in required if name not in columns]
    if missing:
        raise DataError(f"{str(path)!r}: lacks the columns {', '.join(missing)}; it has {', '.join(columns)}")
    if not _row_count(columns):
        raise DataError(f"{str(path)!r}: holds a header and no rows")
    return columns


def _row_count(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def parsed(path: Path, columns: Columns, name: str, parse: Callable[[str], Value], expected: str) -> list[Value]:
    """Parses every field of a column. A `DataError` names the lines of empty or wrong fields, the header as line 1.

    `parse` gets fields without surrounding spaces, never empty, and raises ValueError or KeyError on wrong ones.
    `expected` tells in messages what a field must be.
    """
    values, wrong_lines = [], []
    for line, text in enumerate(columns[name], start=2):
        try:
            if not (stripped := text.strip()):
                raise ValueError(text)
            values.append(parse(stripped))
        except (ValueError, KeyError):
            wrong_lines.append(line)
    if wrong_lines:
        fields = [_shortened(columns[name][line - 2]) for line in wrong_lines[:MAX_LISTED]]
        found = f"column {name!r} is {fields} in {_lines(wrong_lines)}"
        raise DataError(f"{str(path)!r}: {found}; every row needs {expected}")
    return values


def check_unique(path: Path, name: str, values: Sequence[str]) -> None:
    """Refuses a column with one value in two rows, by a `DataError` that names their lines."""
    first: dict[str, int] = {}
    for line, value in enumerate(values, start=2):
        if (earlier := first.setdefault(value, line)) != line:
            raise DataError(f"{str(path)!r}: lines {earlier} and {line} have the same {name} {value!r}; remove one")


def coordinates(path: Path, columns: Columns, longitude: str = "lon", latitude: str = "lat") -> np.ndarray:
    """Reads every row's coordinates as float32 (N, 2), longitude first. "nan" in both columns means unknown."""
    degrees = [
        parsed(path, columns, name, partial(_within, limit), f"degrees in -{limit:g}..{limit:g}, or nan where unknown")
        for name, limit in ((longitude, 180.0), (latitude, 90.0))
    ]
    return np.array(degrees, dtype=np.float32).T


def numeric(path: Path, columns: Columns, names: Sequence[str]) -> np.ndarray:
    """Reads further metadata, such as a time or a sensor's number, as float32 (N, len(names)). "nan" means unknown.

    float32 keeps seven digits, so a time is better given in years than in seconds.
    """
    missing = [name for name in names if name not in columns]
    if missing:
        lacks = f"lacks the columns {', '.join(missing)}; it has {', '.join(columns)}"
        raise DataError(f"{str(path)!r}: {lacks}; name some of these")
    expected = "a number, or nan where unknown; name another column, or write its values as numbers"
    values = [parsed(path, columns, name, partial(_within, FLOAT32_MAX), expected) for name in names]
    return np.array(values, dtype=np.float32).reshape(len(names), _row_count(columns)).T


def choice(*names: str) -> Callable[[str], str]:
    """Returns a parser that accepts only these names."""
    return {name: name for name in names}.__getitem__


def below(folder: Path) -> Callable[[str], str]:
    """Returns a parser of paths that stay below a folder. It does not check that they exist."""
    root = str(folder)

    def parse(text: str) -> str:
        if os.path.isabs(text) or os.pardir in text.replace(os.sep, "/").split("/"):
            raise ValueError(text)
        return os.path.join(root, os.path.normpath(text))

    return parse


def number(text: str) -> str:
    """A parser that accepts decimal digits only and keeps leading zeros."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return text


def _within(limit: float, text: str) -> float:
    value = float(text)
    if not math.isnan(value) and abs(value) > limit:
        raise ValueError(text)
    return value


def _shortened(text: str) -> str:
    return f"{text[:MAX_FIELD_LENGTH]}..." if len(text) > MAX_FIELD_LENGTH else text


def _lines(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:MAX_LISTED]))
    return f"{len(numbers)} lines ({listed}, ...)" if len(numbers) > MAX_LISTED else f"lines {listed}"
