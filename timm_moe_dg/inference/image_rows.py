"""Images to predict as a stream of rows, from files, lists and tar files, and the loader that decodes them."""

import io
import json
import logging
import math
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data.bands import RGB_BANDS, Bands
from ..data.readers.csv_tables import (
    Table,
    csv_chunks,
    existing,
    metadata_values,
    own_place,
    parquet_chunks,
    slashes,
    text_table,
)
from ..data.readers.folders import describe_left_out, find_images, is_hidden, kind_of
from ..data.readers.images import Transform, image_extensions, read_pixels, warn_if_squeezed
from ..errors import DataError, ImageReadError

LISTS = (".csv", ".parquet")
TAR = ".tar"
_CHUNK = 8192  # rows of a list in memory
_BLOCK = 512  # bytes of a tar file
_PADDING = 1 << 16  # bytes behind the end mark that are read; tar pads to 10 KiB
_LOGGER = logging.getLogger(__name__)


class Member(NamedTuple):
    """A file in an uncompressed tar file."""

    tar: str
    offset: int  # of its content
    size: int  # bytes

    def read(self) -> bytes:
        """Reads its content."""
        with open(self.tar, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class ImageRow(NamedTuple):
    """An image to predict."""

    path: str  # as tables and messages have it; of a member, the tar file's path and its name
    metadata: tuple[float, ...] | None = None  # a row of `metadata_values`; None if unknown
    member: Member | None = None  # in place of the file at `path`
    note: Member | None = None  # JSON with the metadata

    def content(self) -> io.BytesIO | None:
        """Reads a member; None for a file."""
        return io.BytesIO(self.member.read()) if self.member else None


class MetadataNames(NamedTuple):
    """The columns of lists, and the keys of JSON members, that hold metadata."""

    ids: bool = False  # location, in place of lon and lat
    columns: Sequence[str] = ()  # after lon and lat

    @property
    def all(self) -> tuple[str, ...]:
        """The names in the order of the values."""
        return ("location",) if self.ids else ("lon", "lat", *self.columns)

    @property
    def unknown(self) -> tuple[float, ...]:
        """The values of an image without metadata."""
        return (-1,) if self.ids else (math.nan,) * len(self.all)


def image_rows(sources: Sequence[str], names: MetadataNames) -> Iterator[ImageRow]:
    """Yields the images of files, folders and patterns (see `find_images`), lists (.csv, .parquet) and .tar files.

    A list has a column path, relative to its folder or absolute, and may have those of `names`. A tar file is as
    WebDataset writes it: the .json beside an image may hold the metadata. The order is always the same.
    """
    left_out: Counter[str] = Counter()
    for path in find_images(sources):
        suffix = Path(path).suffix.lower()
        if suffix in LISTS:
            yield from _listed(Path(path), names)
        elif suffix == TAR:
            yield from _members(path, left_out)
        else:
            yield ImageRow(path)
    if left_out:
        _LOGGER.warning("members of tar files: %s", describe_left_out(left_out))


def check_images(sources: Sequence[str]) -> None:
    """Refuses files, folders, patterns and lists without an image. Call it before loading a network."""
    for source in sources:
        if next(image_rows([source], MetadataNames()), None) is None:
            raise DataError(f"images={source!r}: holds no image; leave it out")


def rows_of(table: Table, names: MetadataNames, folder: str) -> list[ImageRow]:
    """Returns the images of a table with a column path, relative to `folder`."""
    paths = table.parsed("path", str, "the path of an image")
    paths = [os.path.join(folder, slashes(path, folder)) for path in paths]
    paths = [path if path.isascii() else existing(path) or path for path in paths]
    if not any(name in table for name in names.all):
        return list(map(ImageRow, paths))
    table.require(names.all, "add them, or leave out the others")
    table = table if names.ids else table.with_centers(paths)
    return list(map(ImageRow, paths, metadata_values(table, names.ids, names.columns)))


def _listed(path: Path, names: MetadataNames) -> Iterator[ImageRow]:
    wanted = ["path", *names.all]
    is_csv = path.suffix.lower() == ".csv"
    chunks = csv_chunks(path, ["path"], _CHUNK) if is_csv else parquet_chunks(path, ["path"], wanted, _CHUNK)
    for table in chunks:
        yield from rows_of(table, names, os.path.dirname(path))


def _members(path: str, left_out: Counter[str]) -> Iterator[ImageRow]:
    try:
        with tarfile.open(path, "r:") as tar:
            rows, key, note = list[ImageRow](), "", None
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined] # or it keeps them all
                folder, _, name = info.name.rpartition("/")
                if info.isdir() or any(map(is_hidden, PurePosixPath(info.name).parts)):
                    continue
                start, _, extension = name.partition(".")
                member = Member(path, info.offset_data, info.size)
                if (sample := f"{folder}/{start}") != key:
                    yield from (row._replace(note=note) for row in rows)
                    rows, key, note = [], sample, None
                is_plain = info.isreg() and not info.issparse()
                if is_plain and name.lower().endswith(image_extensions()):
                    rows.append(ImageRow(f"{path}/{info.name}", member=member))
                elif is_plain and extension.lower() == "json":
                    note = member
                else:
                    left_out[kind_of(name) if is_plain else "link"] += 1
            yield from (row._replace(note=note) for row in rows)
            # tarfile also stops at a damaged header
            with open(path, "rb") as file:
                file.seek(tar.offset)
                if file.read(_BLOCK) != bytes(_BLOCK):
                    raise tarfile.ReadError(f"no end mark at byte {tar.offset}")
                if file.read(_PADDING).strip(b"\0"):  # as `cat` makes of two, of which tarfile reads the first
                    raise tarfile.ReadError(f"more follows behind its end mark at byte {tar.offset}")
    except (OSError, tarfile.TarError) as error:
        remedy = "give an uncompressed and complete tar file"
        raise DataError(f"images={path!r}: cannot be read as a tar file ({error}); {remedy}") from error


class Batch(NamedTuple):
    """Images of one part, to decode."""

    part: int
    rows: list[ImageRow]
    is_last: bool  # of its part


def batches(parts: Iterator[tuple[int, list[ImageRow]]], batch_size: int) -> Iterator[Batch]:
    """Divides parts into batches. No batch holds images of two parts."""
    for part, rows in parts:
        for start in range(0, max(len(rows), 1), batch_size):
            end = start + batch_size
            yield Batch(part, rows[start:end], end >= len(rows))


def chunks(rows: Iterator[ImageRow], size: int) -> Iterator[list[ImageRow]]:
    """Divides rows into lists of `size`; the last may be shorter."""
    while chunk := list(islice(rows, size)):
        yield chunk


@dataclass
class Decoded:
    """A decoded batch of B images that can be read."""

    batch: Batch
    positions: list[int]  # in the batch's rows
    images: Tensor  # (B, C, H, W)
    metadata: Tensor  # (B, M) float64, or int64 of location ids
    reasons: list[str]  # why the others cannot be read

    def pin_memory(self) -> "Decoded":
        """Moves the images to pinned memory; torch's loader calls this."""
        self.images = self.images.pin_memory()
        return self


@dataclass(frozen=True)
class RowImages(Dataset):
    """Decodes batches of rows; an index is a `Batch`. Images that cannot be decoded are left out."""

    transform: Transform
    names: MetadataNames
    bands: Bands = RGB_BANDS
    reads_places: bool = False  # whether images without metadata have the place that their file tells

    def __getitem__(self, batch: Batch) -> Decoded:
        positions, images, metadata, reasons = list[int](), list[Tensor](), list[tuple[float, ...]](), list[str]()
        for position, row in enumerate(batch.rows):
            try:
                images.append(self._image(row))
                metadata.append(self._metadata(row))
                positions.append(position)
            except ImageReadError as error:
                del images[len(positions) :]
                reasons.append(str(error))
        kind = torch.int64 if self.names.ids else torch.float64
        stacked = torch.stack(images) if images else torch.empty(0)
        return Decoded(batch, positions, stacked, torch.tensor(metadata, dtype=kind), reasons)

    def _image(self, row: ImageRow) -> Tensor:
        pixels = read_pixels(row.path, self.bands, file=row.content())
        image = self.transform(pixels)
        warn_if_squeezed(row.path, pixels, image)
        return image

    def _metadata(self, row: ImageRow) -> tuple[float, ...]:
        if row.metadata is not None:
            return row.metadata
        numbers, given = self.names.unknown, dict[str, object]()
        if row.note is not None:
            try:
                note = json.loads(row.note.read())
                given = note if isinstance(note, dict) else {}
                table = text_table(Path(row.path), {name: [given.get(name)] for name in self.names.all})
                (numbers,) = metadata_values(table, self.names.ids, self.names.columns)
            except (ValueError, DataError, RecursionError) as error:
                reason = f"its metadata cannot be read ({error}); correct its .json"
                raise ImageReadError(f"image={row.path!r}: {reason}") from error
        is_placed = not self.reads_places or not given.keys().isdisjoint(self.names.all[:2])
        place = None if is_placed else own_place(row.path, row.content())
        return numbers if place is None else (*place.degrees, *numbers[2:])


def row_loader(
    images: RowImages, batches: Iterator[Batch], workers: int, pin_memory: bool = False
) -> Iterator[Decoded]:
    """Decodes batches in order. Workers get rows as they are read, and no list of all."""
    loader = DataLoader(
        images,
        batch_size=None,
        sampler=batches,  # of any objects, which become indices
        num_workers=workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # or starting it would advance torch's global one
    )
    # An iterator, since a second iteration of the loader would take batches from the first
    return iter(loader)
