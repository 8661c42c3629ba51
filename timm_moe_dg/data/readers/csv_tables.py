"""Tables of images: csv and Parquet files, with messages that name the file, the line and the column."""

import csv
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from unicodedata import normalize

import numpy as np

from ...errors import DataError, ImageReadError, check_regular_file, needs
from ..domains import normalized
from .images import exif_place
from .rasters import is_placed, is_raster, open_raster, places_of

SEPARATORS = ",;\t"
MAX_LISTED = 5  # lines and fields in a message
MAX_FIELD_LENGTH = 200  # characters of a field in a message
NAMES = "names"  # entry of the user's names of columns
_FORMULAS = ("'=", "'+", "'-", "'@")
MAX_COMPARED = 32  # coordinates that are compared with those of the images
FAR = 100.0  # km
# What R, pandas and spreadsheets write for an empty field; those that pandas.read_csv reads as missing
MISSING = {"", "#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL"}
MISSING |= {"NaN", "Nan", "None", "n/a", "nan", "null", "-nan", "-NaN"}
FLOAT32_MAX = float(np.finfo(np.float32).max)
_NAME_IN_LINE_1 = "name them in line 1, separated by commas, semicolons or tabs"

_LOGGER = logging.getLogger(__name__)

Value = TypeVar("Value")


class Table(dict[str, Sequence[str]]):
    """The fields of each column of a file, by its name, and the line on which each row starts."""

    def __init__(self, path: Path, columns: Mapping[str, Sequence[str]], lines: Sequence[int]) -> None:
        super().__init__(columns)
        self.path, self.lines = path, lines
        self.names: Mapping[str, str] = {}  # of columns in the file that have another name here

    def name(self, column: str) -> str:
        """Returns a column's name in the file."""
        return self.names.get(column, column)

    def error(self, text: str) -> DataError:
        """Returns an error that names the file."""
        return DataError(f"{str(self.path)!r}: {text}")

    def require(self, names: Iterable[str], remedy: str = _NAME_IN_LINE_1) -> None:
        """Raises a `DataError` for columns that the table lacks."""
        if missing := [name for name in dict.fromkeys(names) if name not in self]:
            raise self.error(f"lacks the columns {', '.join(missing)}; it has {', '.join(self)}; {remedy}")

    def parsed(self, name: str, parse: Callable[[str], Value], expected: str) -> list[Value]:
        """Parses every field of a column. A `DataError` names the lines of empty or wrong fields, the header as line 1.

        `parse` gets fields without surrounding spaces, never empty, and raises ValueError or KeyError on wrong ones.
        `expected` tells in messages what a field must be.
        """
        values, wrong = [], list[int]()
        for row, text in enumerate(self[name]):
            try:
                if not (stripped := text.strip()):
                    raise ValueError(text)
                values.append(parse(stripped))
            except (ValueError, KeyError):
                wrong.append(row)
        if wrong:
            fields = [self[name][row][:MAX_FIELD_LENGTH] for row in wrong[:MAX_LISTED]]
            lines = ", ".join(str(self.lines[row]) for row in wrong[:MAX_LISTED])
            where = f"{len(wrong)} lines ({lines}, ...)" if len(wrong) > MAX_LISTED else f"lines {lines}"
            raise self.error(f"column {self.name(name)!r} is {fields} in {where}; every row needs {expected}")
        return values

    def check_unique(self, name: str, values: Sequence[str]) -> None:
        """Refuses a column with one value in two rows, by a `DataError` that names their lines."""
        first: dict[str, int] = {}
        for line, value in zip(self.lines, values, strict=True):
            if (earlier := first.setdefault(value, line)) != line:
                raise self.error(f"lines {earlier} and {line} have the same {self.name(name)} {value!r}; remove one")

    def coordinates(self) -> np.ndarray:
        """Reads every row's coordinates, float64 (N, 2), longitude first. "nan" in both columns means unknown."""
        longitude = self.parsed("lon", partial(_within, 180.0), "degrees in -180..180, or nan where unknown")
        expected = "degrees in -90..90, or nan where unknown; are longitude and latitude swapped?"
        places = np.array([longitude, self.parsed("lat", partial(_within, 90.0), expected)]).T
        if zeros := int((places == 0).all(axis=1).sum()):
            text = "%r: %d rows have longitude 0 and latitude 0, in the Gulf of Guinea; write nan where unknown"
            _LOGGER.warning(text, str(self.path), zeros)
        return places

    def metadata(self, columns: Sequence[str] = ()) -> np.ndarray:
        """Reads every row's coordinates and further numbers, such as a time, float64 (N, 2 + len(columns)).

        "nan" is unknown. The further numbers have float32's seven digits, so a time is better given in years.
        """
        self.require(columns, "name some of these")
        expected = "a number, or nan where unknown; name another column, or write its values as numbers"
        numbers = [self.parsed(name, partial(_within, FLOAT32_MAX), expected) for name in columns]
        further = np.array(numbers, dtype=np.float32).reshape(len(columns), len(self.lines)).T
        return np.concatenate([self.coordinates(), further], axis=1)

    def with_centers(self, paths: Sequence[str]) -> "Table":
        """Completes the columns lon and lat, where both are empty or absent, by the images' own places.

        Raises:
            DataError: An image has no place of its own, or one that is far from the coordinates of its row.
        """
        both = f"{self.name('lon')} and {self.name('lat')}"
        if ("lon" in self) != ("lat" in self):
            raise self.error(f"has one of the columns {both}; name both in line 1, or none")
        columns = {name: list(self.get(name, [""] * len(paths))) for name in ("lon", "lat")}
        given = list[int]()
        for row, path in enumerate(paths):
            if any(column[row].strip() for column in columns.values()):
                given.append(row)
            elif (place := own_place(path)) is not None:
                columns["lon"][row], columns["lat"][row] = map(str, place.degrees)
            else:
                remedy = f"write its {both} in degrees there, or nan if unknown"
                reason = f"has no place of its own, and no coordinates in {self.path.name}"
                raise DataError(f"image={path!r}: {reason}; {remedy}")
        self |= columns
        for row in given[:: -(-len(given) // MAX_COMPARED)] if given else ():
            self._compare(row, own_place(paths[row]))
        return self

    def _compare(self, row: int, place: "Place | None") -> None:
        """Refuses coordinates of a row that are far from the place that the image itself has."""
        try:
            longitude, latitude = float(self["lon"][row]), float(self["lat"][row])
        except ValueError:  # refused when the column is read
            return
        if place is None or not (abs(longitude) <= 180 and abs(latitude) <= 90):
            return
        distance = place.distance(longitude, latitude)
        if distance > place.radius + FAR:
            there = "({:.2f}, {:.2f})".format(*place.degrees)
            both = f"{self.name('lon')} and {self.name('lat')}"
            where = f"line {self.lines[row]}: {both} are {distance:.0f} km from the image's own place {there}"
            raise self.error(f"{where}; are longitude and latitude exchanged?")


def read_csv(path: Path, required: Sequence[str]) -> Table:
    """Reads a csv file with a header. Empty lines are skipped, short lines filled up.

    The separator is the comma, the semicolon or the tab, whichever line 1 has most of. An apostrophe before =, +, - or
    @, as `csv_cell` writes for spreadsheets, is left out.
    """
    (table,) = csv_chunks(path, required)
    return table


def csv_chunks(path: Path, required: Sequence[str], size: int = sys.maxsize) -> Iterator[Table]:
    """Yields the rows of `read_csv` in tables of `size` rows."""
    is_empty = True
    try:
        check_regular_file(path)
        # utf-8-sig skips the byte order mark that spreadsheets write.
        with path.open(newline="", encoding="utf-8-sig") as file:
            first, skipped = file.readline(), 0
            while first.startswith("#") or re.fullmatch(r'"?sep=."?', first.rstrip("\r\n")):  # comments, Excel's hint
                first, skipped = file.readline(), skipped + 1
            separator = max(SEPARATORS, key=first.count)
            reader = csv.reader(chain([first], file), delimiter=separator, skipinitialspace=True)
            header = [name.strip() for name in next(reader, [])]
            if not any(header):
                raise DataError(f"{str(path)!r}: line {skipped + 1} is empty; write the names of the columns there")
            comments = f"; {skipped} lines before the header are comments or sep=" if skipped else ""
            _check_header(path, header, required, f"{_NAME_IN_LINE_1}{comments}")
            rows = _rows(path, reader, len(header), skipped)
            while chunk := list(islice(rows, size)):
                lines, fields = zip(*chunk, strict=True)
                yield Table(path, dict(zip(header, zip(*fields, strict=True), strict=True)), lines)
                is_empty = False
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{str(path)!r}: cannot be read as csv ({error}); save it as text in UTF-8") from error
    if is_empty:
        raise DataError(f"{str(path)!r}: holds a header and no rows; add one for each image")


def _rows(path: Path, reader: Any, width: int, skipped: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the line and the fields of each row. `skipped` lines come before the header."""
    for row in reader:
        line = skipped + reader.line_num
        if len(row) > width:
            remedy = "write numbers with a point, and texts that hold a comma in quotes"
            counts = f"line {line} has {len(row)} fields for {width} columns"
            raise DataError(f"{str(path)!r}: {counts}; {remedy}")
        if row:
            line -= sum(text.count("\n") for text in row)
            fields = [text[1:] if text[:2] in _FORMULAS else text for text in row]
            yield line, fields + [""] * (width - len(row))


def parquet_chunks(path: Path, required: Sequence[str], names: Sequence[str], size: int) -> Iterator[Table]:
    """Yields some columns of a Parquet file in the form of `csv_chunks`. Lines are numbers of rows, from 1."""
    with needs(f"to read {str(path)!r}", "pyarrow", "parquet"):
        from pyarrow import ArrowException, parquet
    end = 0
    try:
        check_regular_file(path)
        with parquet.ParquetFile(path) as file:
            header = file.schema_arrow.names
            _check_header(path, header, required, "name them so")
            for batch in file.iter_batches(size, columns=[name for name in header if name in names]):
                yield text_table(path, batch.to_pydict(), end + 1)
                end += batch.num_rows
    except (OSError, ArrowException) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{str(path)!r}: cannot be read as Parquet ({reason}); write it again") from error
    if not end:
        raise DataError(f"{str(path)!r}: holds no rows; add one for each image")


def text_table(path: Path, columns: Mapping[str, Iterable[object]], first_line: int = 1) -> Table:
    """Writes columns of values as csv has them. A missing number is unknown, and a missing path is empty."""
    missing = {"path": "", "location": "-1"}
    texts = {name: [_text(value, missing.get(name, "nan")) for value in values] for name, values in columns.items()}
    lengths = {len(column) for column in texts.values()}
    if len(lengths) > 1:
        raise DataError(f"{str(path)!r}: the columns have {sorted(lengths)} entries; give one for each image")
    return Table(path, texts, range(first_line, first_line + max(lengths, default=0)))


def _text(value: object, missing: str) -> str:
    if isinstance(value, float) and value.is_integer():  # as pandas stores whole numbers beside missing ones
        return str(int(value))
    return missing if not isinstance(value, str) and str(value) in ("None", "nan", "<NA>") else str(value)


def _check_header(path: Path, header: Sequence[str], required: Sequence[str], remedy: str) -> None:
    if doubled := [name for name in header if name and header.count(name) > 1]:
        raise DataError(f"{str(path)!r}: names the column {doubled[0]!r} twice; rename or remove one")
    Table(path, dict.fromkeys(header, ()), ()).require(required, remedy)


class Metadata:
    """The metadata of images by path, from a csv table, whose paths are absolute or relative to its folder.

    Its other columns are those of `metadata_values`. Where lon and lat are empty or absent, they come from the GeoTIFF.
    The table is in memory as a whole.
    """

    def __init__(self, path: Path, ids: bool = False, columns: Sequence[str] = ()) -> None:
        table = read_csv(path, ["path", "location"] if ids else ["path"])
        self._table, self._place, folder = path, cache(os.path.realpath), str(path.parent)
        paths = [os.path.join(folder, slashes(text.strip(), folder)) for text in table["path"]]
        files = [_same_file(file, self._place) for file in paths]
        table.check_unique("path", files)
        values = metadata_values(table if ids else table.with_centers(files), ids, columns)
        self._first = table["path"][0], files[0]
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


def metadata_values(table: Table, ids: bool = False, columns: Sequence[str] = ()) -> list[tuple[float, ...]]:
    """Reads every row's metadata: lon and lat in degrees ("nan" in both if unknown) and the further numeric `columns`.

    With `ids` it is the column location instead: an integer that is negative if unknown.
    """
    if ids:
        return [(place,) for place in table.parsed("location", whole_number, "a whole number")]
    return list(map(tuple, table.metadata(columns).tolist()))


def _same_file(path: str, place: Callable[[str], str]) -> str:
    """A name that a file has however its path is spelled: by links to folders, ./ and .., or other forms of letters."""
    folder, name = os.path.split(path)
    return normalized(os.path.join(place(folder), name))


class Place(NamedTuple):
    """The place stored in an image file."""

    degrees: tuple[float, float]  # longitude and latitude
    radius: float  # km, from the center to a corner

    def distance(self, longitude: float, latitude: float) -> float:
        """Returns the distance of a point in km, by the haversine formula."""
        (west, south), (east, north) = np.deg2rad([self.degrees, (longitude, latitude)])
        sides = math.sin((north - south) / 2) ** 2
        sides += math.cos(south) * math.cos(north) * math.sin((east - west) / 2) ** 2
        return 2 * 6371.0 * math.asin(math.sqrt(float(np.clip(sides, 0.0, 1.0))))  # NaN stays


def own_place(path: str, file: BinaryIO | None = None) -> Place | None:
    """Returns the center of a GeoTIFF, or the place of a photograph's GPS tags; None of other files.

    An open `file` is read in place of that at `path`.
    """
    try:
        if not is_raster(file or path):
            degrees = exif_place(file or path)
            return None if degrees is None else Place(degrees, 0.0)
        with open_raster(path, file=file) as raster:
            width, height = raster.dataset.width, raster.dataset.height
            if not is_placed(raster.dataset):
                return None
            center, corner = places_of(raster.dataset, [width / 2, 0], [height / 2, 0]).tolist()
    except (OSError, ImageReadError):  # a damaged image is refused when it is read
        return None
    degrees = (center[0], center[1])
    return Place(degrees, float(np.nan_to_num(Place(degrees, 0.0).distance(*corner))))


# Parsers of fields


def name_parser(columns: Mapping[str, str] | None) -> Callable[[str], str]:
    """Returns a parser of names, in their composed form, that refuses words for a missing value.

    The user's `columns` may have an entry `names`: such words that are names, separated by commas.
    """
    refused = MISSING - set(str((columns or {}).get(NAMES, "")).split(","))

    def parse(text: str) -> str:
        if text in refused:
            raise ValueError(text)
        return normalized(text)

    return parse


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


def existing(path: str) -> str | None:
    """Returns a path as the file system spells it, maybe by another form of the same letters; None for no file."""
    return next(filter(os.path.isfile, (path, *(normalize(form, path) for form in ("NFC", "NFD")))), None)


def number(text: str) -> str:
    """Accepts decimal digits only and keeps leading zeros."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return text


def whole_number(text: str) -> int:
    """Accepts whole numbers below 2 ** 63. Python's own parser reads 1_0 as 10."""
    if "_" in text or abs(int(text)) >= 1 << 63:
        raise ValueError(text)
    return int(text)


def _within(limit: float, text: str) -> float:
    value = float(text)
    if "_" in text or abs(value) > limit:  # which NaN is not
        raise ValueError(text)
    return value
