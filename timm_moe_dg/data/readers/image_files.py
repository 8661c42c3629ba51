"""Images without labels, from files, folders or patterns, with metadata from a table."""

import glob
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from unicodedata import normalize

import numpy as np

from ...errors import DataError
from ..bands import image_extensions
from .csv_tables import Columns, check_unique, coordinates, numeric, parsed, read_csv, slashes, whole_number
from .georeference import with_coordinates
from .images import describe_left_out, is_hidden, walk_images

_LOGGER = logging.getLogger(__name__)


def find_images(sources: Sequence[str]) -> list[str]:
    """Lists image files in the order of the sources, sorted by path within each, every file once.

    Sources are files with any extension, patterns with *, ? and **, or folders, in which files with an extension that
    Pillow reads are searched at any depth. The log counts the other files of folders.
    """
    return list(image_paths(sources))


def image_paths(sources: Sequence[str]) -> Iterator[str]:
    """Yields the paths of `find_images`. Of folders, one folder's names are in memory at a time."""
    left_out: Counter[str] = Counter()
    folders, files = list[str](), set[str]()  # absolute paths of what was yielded before
    for source in sources:
        is_empty = True
        for path in _paths_of(source, left_out):
            is_empty, place = False, os.path.abspath(path)
            if place in files or any(_is_image_below(place, folder) for folder in folders):
                continue
            if not os.path.isdir(source):
                files.add(place)
            yield path
        if is_empty:
            remark = f"; {describe_left_out(left_out)}" if left_out else ""
            raise DataError(f"images={source!r}: no such file, or no image below or matching it{remark}")
        if os.path.isdir(source):
            folders.append(os.path.abspath(source))
    if left_out:
        _LOGGER.warning("images: %s", describe_left_out(left_out))


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


def _paths_of(source: str, left_out: Counter[str]) -> Iterable[str]:
    if os.path.isfile(source):
        return [source]
    if os.path.isdir(source):
        return (os.path.join(folder, name) for folder, name in walk_images(source, left_out))
    named, matches = set(Path(source).parts), glob.glob(source, recursive=True)
    if "**" not in source and (folders := sum(os.path.isdir(path) and not is_hidden(path) for path in matches)):
        _warn_of_folders(source, folders)
    paths = filter(os.path.isfile, matches)
    return sorted(path for path in paths if not any(map(is_hidden, set(Path(path).parts) - named - {".."})))


@cache  # once in a process, because a pattern is read more than once
def _warn_of_folders(pattern: str, count: int) -> None:
    _LOGGER.warning("images=%r: matches folders (%d), which are not searched; use ** to search them", pattern, count)


def _is_image_below(path: str, folder: str) -> bool:
    """Whether `walk_images` yields a file of a folder, both absolute."""
    below = path.removeprefix(os.path.join(folder, ""))
    return below != path and path.lower().endswith(image_extensions()) and not any(map(is_hidden, below.split(os.sep)))


def _same_file(path: str, place: Callable[[str], str]) -> str:
    """A name that a file has however its path is spelled: by links to folders, ./ and .., or other forms of letters."""
    folder, name = os.path.split(path)
    return normalize("NFC", os.path.join(place(folder), name))
