"""Reading csv files of images, with messages that name the file, the line and the column."""

import csv
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, overload

import numpy as np

from ...errors import DataError
from ..texts import Texts

CsvRow = dict[str, str]
SHOWN = 5
LONGEST = 200  # characters of a field in a message
_CHUNK = 10_000  # lines
FLOAT32_MAX = float(np.finfo(np.float32).max)

Value = TypeVar("Value")


class CsvRows(Sequence[CsvRow]):
    """The rows of a csv file, kept column by column; a row is put together when it is asked for.

    Args:
        header: Names of the columns.
        lines: The fields of each line; empty lines are left out, and short ones filled up with empty fields.
    """

    def __init__(self, header: Sequence[str], lines: Iterator[list[str]]) -> None:
        columns = [Texts() for _ in header]
        while chunk := list(islice(lines, _CHUNK)):
            filled = (line + [""] * (len(header) - len(line)) for line in chunk if line)
            for column, texts in zip(columns, zip(*filled, strict=False), strict=False):
                column.extend(texts)
        self.columns = dict(zip(header, columns, strict=True))

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @overload
    def __getitem__(self, index: int) -> CsvRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[CsvRow]: ...

    def __getitem__(self, index: int | slice) -> CsvRow | list[CsvRow]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        return {name: column[index] for name, column in self.columns.items()}

    def __eq__(self, other: object) -> bool:
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]  # as a list's


def read_csv(path: Path, columns: Sequence[str]) -> CsvRows:
    """Reads a csv file with a header.

    Raises:
        DataError: There is no such file, it is empty, or it lacks one of the columns.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            found = next(reader, [])
            rows = CsvRows(found, reader)
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
    for line, text in enumerate(field(rows, column), start=2):
        try:
            if not (stripped := text.strip()):
                raise ValueError(text)
            values.append(parse(stripped))
        except (ValueError, KeyError):
            wrong.append(line)
    if wrong:
        fields = [_shortened(rows[line - 2][column]) for line in wrong[:SHOWN]]
        raise DataError(f"{str(path)!r}: column {column!r} is {fields} in {_lines(wrong)}; every row needs {wanted}")
    return values


def field(rows: Sequence[CsvRow], column: str) -> Iterable[str]:
    """The field that every row has in a column."""
    return rows.columns[column] if isinstance(rows, CsvRows) else (row[column] for row in rows)


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
    root = str(folder)

    def parse(text: str) -> str:
        if os.path.isabs(text) or os.pardir in text.replace(os.sep, "/").split("/"):
            raise ValueError(text)
        return os.path.join(root, os.path.normpath(text))

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


def _shortened(text: str) -> str:
    return f"{text[:LONGEST]}..." if len(text) > LONGEST else text


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return f"{len(numbers)} lines ({shown}, ...)" if len(numbers) > SHOWN else f"lines {shown}"
