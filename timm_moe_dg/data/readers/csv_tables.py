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

Columns: TypeAlias = Mapping[str, Sequence[str]]  # the fields of each column, by its name, see also `Table`
MAX_LISTED = 5  # lines and fields in a message
MAX_FIELD_LENGTH = 200  # characters of a field in a message
FLOAT32_MAX = float(np.finfo(np.float32).max)

Value = TypeVar("Value")


class Table(dict[str, list[str]]):
    """The fields of each column, by its name, and the line on which each row starts."""

    lines: Sequence[int] = ()


def read_csv(path: Path, required: Sequence[str]) -> Columns:
    """Reads a csv file with a header into one list per column. Empty lines are skipped, short lines filled up."""
    try:
        check_regular_file(path)
        # utf-8-sig skips the byte order mark that spreadsheets write.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            if not (header := list(reader.fieldnames or [])):
                raise DataError(f"{str(path)!r}: line 1 is empty; write the names of the columns there")
            columns, lines = Table({name: [] for name in header}), list[int]()
            if doubled := [name for name in columns if name and header.count(name) > 1]:
                raise DataError(f"{str(path)!r}: line 1 names the column {doubled[0]!r} twice; rename or remove one")
            for row in reader:
                if None in row:  # fields beyond the last column
                    raise DataError(
                        f"{str(path)!r}: line {reader.line_num} has {len(header) + len(row[None])} fields for "
                        f"{len(header)} columns; write numbers with a point, and texts that hold a comma in quotes"
                    )
                lines.append(reader.line_num - sum(text.count("\n") for text in row.values()))
                for name, fields in columns.items():
                    fields.append(row[name])
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r}: cannot be read as csv ({error}); save it as text in UTF-8") from error
    missing = [name for name in required if name not in columns]
    if missing:
        remedy = "name them in line 1, separated by commas"
        raise DataError(f"{str(path)!r}: lacks the columns {', '.join(missing)}; it has {', '.join(columns)}; {remedy}")
    if not _row_count(columns):
        raise DataError(f"{str(path)!r}: holds a header and no rows; add one for each image")
    columns.lines = lines
    return columns


def _line_numbers(columns: Columns) -> Sequence[int]:
    return getattr(columns, "lines", range(2, 2 + _row_count(columns)))


def _row_count(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def parsed(path: Path, columns: Columns, name: str, parse: Callable[[str], Value], expected: str) -> list[Value]:
    """Parses every field of a column. A `DataError` names the lines of empty or wrong fields, the header as line 1.

    `parse` gets fields without surrounding spaces, never empty, and raises ValueError or KeyError on wrong ones.
    `expected` tells in messages what a field must be.
    """
    values, wrong = [], list[int]()
    for row, text in enumerate(columns[name]):
        try:
            if not (stripped := text.strip()):
                raise ValueError(text)
            values.append(parse(stripped))
        except (ValueError, KeyError):
            wrong.append(row)
    if wrong:
        fields = [_shortened(columns[name][row]) for row in wrong[:MAX_LISTED]]
        numbers = _line_numbers(columns)
        wrong_fields = f"column {name!r} is {fields} in {_lines([numbers[row] for row in wrong])}"
        raise DataError(f"{str(path)!r}: {wrong_fields}; every row needs {expected}")
    return values


def check_unique(path: Path, columns: Columns, name: str, values: Sequence[str]) -> None:
    """Refuses a column with one value in two rows, by a `DataError` that names their lines."""
    first: dict[str, int] = {}
    for line, value in zip(_line_numbers(columns), values, strict=True):
        if (earlier := first.setdefault(value, line)) != line:
            raise DataError(f"{str(path)!r}: lines {earlier} and {line} have the same {name} {value!r}; remove one")


def coordinates(path: Path, columns: Columns, longitude: str = "lon", latitude: str = "lat") -> np.ndarray:
    """Reads every row's coordinates as float32 (N, 2), longitude first. "nan" in both columns means unknown."""
    degrees = []
    for name, limit in ((longitude, 180.0), (latitude, 90.0)):
        expected = f"degrees in -{limit:g}..{limit:g}, or nan where unknown"
        if name == latitude and any(map(_is_longitude, columns[name])):
            expected += "; are longitude and latitude swapped?"
        degrees.append(parsed(path, columns, name, partial(_within, limit), expected))
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
    """Returns a parser of paths that stay below a folder. It does not check that they exist.

    Backslashes of Windows separate folders, unless a file has the name as it is written.
    """
    root = str(folder)

    def parse(text: str) -> str:
        text = slashes(text, root)
        if os.path.isabs(text) or os.pardir in text.split("/"):
            raise ValueError(text)
        return os.path.join(root, os.path.normpath(text))

    return parse


def slashes(path: str, folder: str) -> str:
    """Replaces the backslashes of a path from Windows, unless it names a file below the folder as it is."""
    return path if "\\" not in path or os.path.exists(os.path.join(folder, path)) else path.replace("\\", "/")


def number(text: str) -> str:
    """A parser that accepts decimal digits only and keeps leading zeros."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return text


def whole_number(text: str) -> int:
    """A parser of whole numbers below 2 ** 63. Python's own reads 1_0 as 10."""
    if "_" in text or abs(int(text)) >= 1 << 63:
        raise ValueError(text)
    return int(text)


def _is_longitude(text: str) -> bool:
    try:
        return 90 < abs(_within(180.0, text)) <= 180
    except ValueError:
        return False


def _within(limit: float, text: str) -> float:
    value = float(text)
    if "_" in text:  # Python reads 1_0 as 10
        raise ValueError(text)
    if not math.isnan(value) and abs(value) > limit:
        raise ValueError(text)
    return value


def _shortened(text: str) -> str:
    return f"{text[:MAX_FIELD_LENGTH]}..." if len(text) > MAX_FIELD_LENGTH else text


def _lines(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers[:MAX_LISTED]))
    return f"{len(numbers)} lines ({listed}, ...)" if len(numbers) > MAX_LISTED else f"lines {listed}"
