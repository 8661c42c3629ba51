"""Tables of images: csv and Parquet files, with messages that name the file, the line and the column."""

import csv
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar
from unicodedata import normalize

import numpy as np

from ...errors import DataError, check_regular_file, needs
from ..domains import normalized
from ..rasters import is_placed, open_raster, places_of
from .images import is_tiff

Columns: TypeAlias = Mapping[str, Sequence[str]]  # the fields of each column, by its name, see also `Table`
SEPARATORS = ",;\t"
MAX_LISTED = 5  # lines and fields in a message
MAX_FIELD_LENGTH = 200  # characters of a field in a message
FLOAT32_MAX = float(np.finfo(np.float32).max)
Value = TypeVar("Value")


class Table(dict[str, list[str]]):
    """The fields of each column, by its name, and the line on which each row starts."""

    lines: list[int]

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Makes a table without rows."""
        table = cls({name: [] for name in names})
        table.lines = []
        return table


def read_csv(path: Path, required: Sequence[str]) -> Table:
    """Reads a csv file with a header into one list per column. Empty lines are skipped, short lines filled up.

    The separator is the comma, the semicolon or the tab, whichever line 1 has most of.
    """
    (columns,) = csv_chunks(path, required)
    return columns


def csv_chunks(path: Path, required: Sequence[str], size: int = sys.maxsize) -> Iterator[Table]:
    """Yields the rows of `read_csv` in tables of `size` rows."""
    remedy = "name them in line 1, separated by commas, semicolons or tabs"
    try:
        check_regular_file(path)
        # utf-8-sig skips the byte order mark that spreadsheets write.
        with path.open(newline="", encoding="utf-8-sig") as file:
            separator = max(SEPARATORS, key=file.readline().count)
            file.seek(0)
            reader = csv.DictReader(file, restval="", delimiter=separator)
            if not (header := list(reader.fieldnames or [])):
                raise DataError(f"{str(path)!r}: line 1 is empty; write the names of the columns there")
            _check_header(path, header)
            columns, is_empty = Table.of(header), True
            for row in reader:
                if None in row:  # fields beyond the last column
                    raise DataError(
                        f"{str(path)!r}: line {reader.line_num} has {len(header) + len(row[None])} fields for "
                        f"{len(header)} columns; write numbers with a point, and texts that hold a comma in quotes"
                    )
                columns.lines.append(reader.line_num - sum(text.count("\n") for text in row.values()))
                for name, fields in columns.items():
                    fields.append(row[name])
                if len(columns.lines) == size:
                    require_columns(path, header, required, remedy)
                    yield columns
                    columns, is_empty = Table.of(header), False
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r}: cannot be read as csv ({error}); save it as text in UTF-8") from error
    require_columns(path, header, required, remedy)
    if columns.lines:
        yield columns
    elif is_empty:
        raise DataError(f"{str(path)!r}: holds a header and no rows; add one for each image")


def parquet_chunks(path: Path, required: Sequence[str], names: Sequence[str], size: int) -> Iterator[Table]:
    """Yields some columns of a Parquet file in the form of `csv_chunks`. Lines are numbers of rows, from 1."""
    with needs(f"to read {str(path)!r}", "pyarrow", "parquet"):
        from pyarrow import ArrowException, parquet
    end = 0
    try:
        check_regular_file(path)
        with parquet.ParquetFile(path) as file:
            header = file.schema_arrow.names
            _check_header(path, header)
            require_columns(path, header, required, "name them so")
            for batch in file.iter_batches(size, columns=[name for name in header if name in names]):
                columns = text_table(batch.to_pydict(), end + 1)
                end += batch.num_rows
                yield columns
    except (OSError, ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{str(path)!r}: cannot be read as Parquet ({reason}); write it again") from error
    if not end:
        raise DataError(f"{str(path)!r}: holds no rows; add one for each image")


def _check_header(path: Path, header: Sequence[str]) -> None:
    if doubled := [name for name in header if name and header.count(name) > 1]:
        raise DataError(f"{str(path)!r}: names the column {doubled[0]!r} twice; rename or remove one")


def require_columns(path: Path, header: Sequence[str], required: Sequence[str], remedy: str) -> None:
    """Raises a `DataError` for columns that a table lacks."""
    if missing := [name for name in dict.fromkeys(required) if name not in header]:
        raise DataError(f"{str(path)!r}: lacks the columns {', '.join(missing)}; it has {', '.join(header)}; {remedy}")


def text_table(columns: Mapping[str, Iterable[object]], first_line: int = 1) -> Table:
    """Writes columns of values as csv has them. A missing number is unknown, and a missing path is empty."""
    missing = {"path": "", "location": "-1"}
    texts = {name: [_text(value, missing.get(name, "nan")) for value in values] for name, values in columns.items()}
    if len(lengths := {len(column) for column in texts.values()}) > 1:
        raise DataError(f"rows: the columns have {sorted(lengths)} entries; give one for each image")
    table = Table(texts)
    table.lines = list(range(first_line, first_line + _row_count(table)))
    return table


def _text(value: object, missing: str) -> str:
    if isinstance(value, float) and value.is_integer():  # as pandas stores whole numbers beside missing ones
        return str(int(value))
    return missing if not isinstance(value, str) and str(value) in ("None", "nan", "<NA>") else str(value)


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


def name_of_field(text: str) -> str:
    """A parser of names, which accepts no missing one. Returns their composed form."""
    if text.casefold() == "nan":  # what other programs write for an empty field
        raise ValueError(text)
    return normalized(text)


def check_unique(path: Path, columns: Columns, name: str, values: Sequence[str]) -> None:
    """Refuses a column with one value in two rows, by a `DataError` that names their lines."""
    first: dict[str, int] = {}
    for line, value in zip(_line_numbers(columns), values, strict=True):
        if (earlier := first.setdefault(value, line)) != line:
            raise DataError(f"{str(path)!r}: lines {earlier} and {line} have the same {name} {value!r}; remove one")


def coordinates(
    path: Path, columns: Columns, longitude: str = "lon", latitude: str = "lat", dtype: Any = np.float32
) -> np.ndarray:
    """Reads every row's coordinates as `dtype` (N, 2), longitude first. "nan" in both columns means unknown."""
    degrees = []
    for name, limit in ((longitude, 180.0), (latitude, 90.0)):
        expected = f"degrees in -{limit:g}..{limit:g}, or nan where unknown"
        if name == latitude and any(map(_is_longitude, columns[name])):
            expected += "; are longitude and latitude swapped?"
        degrees.append(parsed(path, columns, name, partial(_within, limit), expected))
    return np.array(degrees, dtype=dtype).T


def numeric(path: Path, columns: Columns, names: Sequence[str]) -> np.ndarray:
    """Reads further metadata, such as a time or a sensor's number, as float32 (N, len(names)). "nan" means unknown.

    float32 keeps seven digits, so a time is better given in years than in seconds.
    """
    require_columns(path, list(columns), names, "name some of these")
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


class Metadata:
    """The metadata of images by path, from a csv table, whose paths are absolute or relative to its folder.

    Its other columns are those of `metadata_values`. Where lon and lat are empty or absent, they come from the GeoTIFF.
    The table is in memory as a whole.
    """

    def __init__(self, table: Path, ids: bool = False, columns: Sequence[str] = ()) -> None:
        fields = read_csv(table, ["path", "location"] if ids else ["path"])
        self._table, self._place, folder = table, cache(os.path.realpath), str(table.parent)
        paths = [os.path.join(folder, slashes(path.strip(), folder)) for path in fields["path"]]
        files = [_same_file(path, self._place) for path in paths]
        check_unique(table, fields, "path", files)
        values = metadata_values(table, fields if ids else with_coordinates(table, fields, files), ids, columns)
        self._first = fields["path"][0], files[0]
        self._values = dict(zip(files, values, strict=True))

    def of(self, path: str) -> tuple[float, ...] | None:
        """Returns an image's row of `metadata_values`, or None if the table lacks it."""
        name = _same_file(path, self._place)
        # Images may be links to the files of the table
        return self._values.get(name) or self._values.get(os.path.realpath(name))

    def check(self, paths: Iterable[str]) -> None:
        """Raises a `DataError` if the table has none of the images. Paths are read up to the first that it has."""
        first = None
        for path in paths:
            if self.of(path):
                return
            first = first or os.path.realpath(_same_file(path, self._place))
        expected = f"such as {self._first[0]!r}, which is {self._first[1]!r}; the first image is {first!r}"
        raise DataError(
            f"metadata={str(self._table)!r}: none of its {len(self._values)} paths is one of the images, {expected}"
        )


def metadata_values(
    table: Path, fields: Columns, ids: bool = False, columns: Sequence[str] = ()
) -> list[tuple[float, ...]]:
    """Reads every row's metadata: lon and lat in degrees ("nan" in both if unknown) and the further numeric `columns`.

    With `ids` it is the column location instead: an integer that is negative if unknown.
    """
    if ids:
        return [(place,) for place in parsed(table, fields, "location", whole_number, "a whole number")]
    lonlat = coordinates(table, fields, dtype=np.float64)
    return list(map(tuple, np.concatenate([lonlat, numeric(table, fields, columns)], axis=1).tolist()))


def _same_file(path: str, place: Callable[[str], str]) -> str:
    """A name that a file has however its path is spelled: by links to folders, ./ and .., or other forms of letters."""
    folder, name = os.path.split(path)
    return normalize("NFC", os.path.join(place(folder), name))


def with_coordinates(table: os.PathLike[str], fields: Columns, paths: Sequence[str]) -> Columns:
    """Completes the columns lon and lat of a csv table, where both are empty or absent, by the centers of its files."""
    if ("lon" in fields) != ("lat" in fields):
        raise DataError(f"{str(table)!r}: has one of the columns lon and lat; name both in line 1, or none")
    columns = [list(fields.get(name, [""] * len(paths))) for name in ("lon", "lat")]
    for row, path in enumerate(paths):
        if not any(column[row].strip() for column in columns):
            columns[0][row], columns[1][row] = map(str, _center(table, path))
    completed = Table(
        {name: list(column) for name, column in fields.items()} | dict(zip(("lon", "lat"), columns, strict=True))
    )
    if isinstance(fields, Table):
        completed.lines = fields.lines
    return completed


def _center(table: os.PathLike[str], path: str) -> np.ndarray:
    if os.path.isfile(path) and is_tiff(path):
        with open_raster(path, "image") as raster:
            if is_placed(raster):
                return places_of(raster, [raster.width / 2], [raster.height / 2])[0]
    remedy = "write its lon and lat in degrees there, or nan if unknown"
    raise DataError(f"image={path!r}: has no georeference, and no coordinates in {os.path.basename(table)}; {remedy}")
