"""Classes of images, as a table with a row for each image: one CSV file, or a folder of Parquet files.

Any number of processes write the files of a folder, each of a fixed number of images. A file that exists is finished,
because it is written under a hidden name and then renamed. No process talks to another.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from ..cli.arguments import option
from ..cli.text import csv_path, utf8
from ..cli.values import positive_int, shard_text
from ..data.readers.csv_tables import Metadata
from ..errors import ArgumentError, DataError, ImageReadError, StorageError, needs
from ..networks.trained import network_digest
from ..storage.files import all_or_nothing, json_text, synchronize, write_rows
from .image_rows import ImageRow, chunks, image_rows
from .predictor import (
    ABSTAIN,
    SET,
    STATUS,
    Column,
    LoadedModel,
    Part,
    PartOptions,
    Predictor,
    answer_columns,
    listed,
)

JOB = "_job.json"  # readers of Parquet folders skip names with an underscore
INPUT, FILES, UNREADABLE = b"input", b"files", b"unreadable"  # entries of a part's metadata
_NAME = re.compile(r"part-(\d+)\.parquet")


# fmt: off
@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The metadata of images."""

    metadata: str | None = option(None, metavar="CSV",
        help="places of the images; paths in it are relative to its folder")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Where the table of predictions goes."""

    output: str | None = option(None, metavar="PATH",
        help="FILE.csv, or a folder of Parquet files, with which the same command goes on (default: standard output)")
    force: bool = option(False, help="replace an existing file")
    part_size: int = option(10_000, type=positive_int, help="images per Parquet file (default: %(default)s)")
    shard: str | None = option(None, type=shard_text, metavar="I/N",
        help="predict share I, from 0 to N - 1, of a folder's files; other machines predict the others")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class PredictOptions(PartOptions, ImageOptions, TableOptions):
    """All options of a prediction."""

    images: Sequence[str]  # files, folders or patterns

    @property
    def folder(self) -> Path | None:
        """The folder of parts, if `output` names one."""
        if self.output is None:
            return None
        path = Path(self.output)
        return path if path.is_dir() or not path.suffix or self.output.endswith(os.sep) else None


def predict(options: PredictOptions, model: LoadedModel, file: TextIO | None = None) -> Iterator[list[Any]]:
    """Predicts images, and writes the table as CSV to `options.output`, or to an open file, as it goes.

    Yields:
        A row for each image: its path, and the values of `answer_columns`. Probabilities are rounded to six digits, as
        in the file. Logits and other lists are cells. An image that cannot be decoded has None for its answer.

    Raises:
        ImageReadError: No image can be decoded.
    """
    if Shard.of(options.shard, os.environ).step > 1:
        remedy = "one process writes a table; several write a folder of parts: --output FOLDER"
        raise ArgumentError.of("output", options.output, remedy)
    names, is_first, can_read = ["path", *answer_columns(options)], True, False
    with ExitStack() as stack:
        if options.output:
            path = Path(options.output)
            folder = stack.enter_context(all_or_nothing(path.parent, [path.name], overwrite=options.force))
            file = stack.enter_context((folder / path.name).open("w", newline="", encoding="utf-8"))
        predictor = Predictor(options, model)
        for part in predictor.parts(enumerate(_parts(options, predictor))):
            rows = list(map(list, zip(*(listed(part.table[name]) for name in names), strict=True)))
            if file is not None and rows:
                cells = [[csv_path(path), *map(_cell, others)] for path, *others in rows]
                write_rows(file, [names, *cells] if is_first else cells)
                file.flush()
            yield from rows
            is_first &= not rows
            can_read |= len(part.unreadable) < part.images
    if not can_read:
        raise ImageReadError(f"images={options.images!r}: none can be decoded; repair or remove the files")


def predict_parts(options: PredictOptions, model: LoadedModel, folder: Path) -> "PartFolder":
    """Predicts the unfinished parts of this process into a folder, which is returned."""
    if options.force:
        raise ArgumentError.of("force", True, "parts are never replaced; remove the folder, or choose another")
    predictor = Predictor(options, model)
    job = {
        "model": network_digest(model.network)[:16],
        "classes": hashlib.sha256(repr(model.classes).encode()).hexdigest()[:16],
        "images": list(options.images),
        "metadata": options.metadata,
        "img_size": options.img_size,
        "part_size": options.part_size,
        "columns": predictor.columns,
        "skip_unreadable": options.skip_unreadable,
        "temperature": model.temperature,
        # None as in folders that earlier versions began
        "certainty": [options.coverage, predictor.least, predictor.confident, None],
    }
    target, shard = PartFolder(folder, job), Shard.of(options.shard, os.environ)
    for part in predictor.parts(target.unfinished(_parts(options, predictor), shard)):
        target.write(part)
    target.check_complete(shard)
    return target


def _parts(options: PredictOptions, predictor: Predictor) -> Iterator[list[ImageRow]]:
    """Yields the images of each part, with the metadata of `options.metadata`."""
    rows = image_rows(options.images, predictor.names)
    if options.metadata is not None:
        if not predictor.reads_metadata:
            raise ArgumentError.of("metadata", options.metadata, f"{options.model} does not read any; leave it out")
        table = Metadata(Path(options.metadata), *predictor.names)
        table.check(row.path for row in image_rows(options.images, predictor.names))
        rows = (row._replace(metadata=table.of(row.path) or row.metadata) for row in rows)
    return chunks(rows, options.part_size)


def _cell(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "|".join(value)
    if isinstance(value, list):
        return json.dumps([round(number, 6) for number in value])
    return f"{value:.6f}" if isinstance(value, float) else value


class Shard(NamedTuple):
    """The share of a process: every `step`-th part from the `first`."""

    first: int = 0
    step: int = 1

    @classmethod
    def of(cls, text: str | None, environment: Mapping[str, str]) -> "Shard":
        """Reads I/N. Processes of a launcher (RANK, WORLD_SIZE) divide that share among them."""
        index, total = map(int, (text or "0/1").split("/"))
        rank, size = (int(environment.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        return cls(index * size + rank, total * size)


class PartFolder:
    """The folder of a job, which is new, empty, or of the same job. Others are an `ArgumentError`.

    Args:
        folder: It is made if needed.
        job: Everything that the parts depend on, ready for JSON.
    """

    def __init__(self, folder: Path, job: Mapping[str, object]) -> None:
        _parquet()
        _check_folder(folder)
        self.folder, self.total = folder, 0
        # Digests of each part of all shards: of its rows and, in this shard, of the sizes and times of its files
        self._digests: list[dict[bytes, str]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write_job(json_text(job, indent=1))
            saved = json.loads((folder / JOB).read_text())
            differing = [name for name in {**saved, **job} if saved.get(name) != job.get(name)]
        except (ValueError, TypeError, AttributeError) as error:
            raise ArgumentError.of("output", str(folder), f"its {JOB} is damaged; choose another folder") from error
        except OSError as error:
            raise ArgumentError.of("output", str(folder), f"cannot be written ({error}); choose another") from error
        if differing:
            values = " and not ".join(repr(table.get(differing[0])) for table in (saved, job))
            remedy = f"holds the parts of another job, whose {differing[0]} is {values}; choose another folder"
            raise ArgumentError.of("output", str(folder), remedy)

    def unfinished(self, parts: Iterator[list[ImageRow]], shard: Shard) -> Iterator[tuple[int, list[ImageRow]]]:
        """Yields the numbers and images of a shard's parts that do not exist. All parts are read, for their number."""
        for number, rows in enumerate(parts):
            self.total = number + 1
            self._digests.append({INPUT: _digest(rows)})
            if number % shard.step != shard.first:
                continue
            # Other machines may have copies with other times
            self._digests[number][FILES] = _digest(_file_states(rows))
            if self._path(number).exists():
                self._check_input(number)
            else:
                yield number, rows

    def check_complete(self, shard: Shard) -> None:
        """Raises a `DataError` for parts that are missing from a shard, or that are of other images in any shard."""
        finished = self.finished()
        if finished and finished[-1] >= self.total:
            raise self._changed(finished[-1])
        for number in finished:  # of all shards, each of which lists the images by itself
            self._check_input(number)
        if missing := sorted({*range(shard.first, self.total, shard.step)} - {*finished}):
            raise DataError(f"output={str(self._path(missing[0]))!r}: was removed; give the same command again")

    def finished(self) -> list[int]:
        """Returns the numbers of the parts that exist, of all shards."""
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, os.listdir(self.folder)) if match)

    def write(self, part: Part) -> None:
        """Writes a part of `unfinished`."""
        path = self._path(part.number)
        fresh = self.folder / f".{path.name}.{secrets.token_hex(4)}"
        notes = {**self._digests[part.number], UNREADABLE: json.dumps(part.unreadable)}
        try:
            _parquet().write_table(_arrow_table(part.table, notes), fresh)
            synchronize(fresh)
            for leftover in self.folder.glob(f".{path.name}.*"):  # of processes that were killed
                if leftover != fresh:
                    leftover.unlink(missing_ok=True)
            fresh.replace(path)
            synchronize(self.folder)
        except FileNotFoundError:
            if not path.exists():  # a second process with the same shard has written it
                raise
        except OSError as error:
            fresh.unlink(missing_ok=True)
            remedy = "free some space or correct the permissions, then give the same command again"
            raise StorageError(
                f"output={str(path)!r}: cannot be written ({error}); finished parts are intact: {remedy}"
            ) from error

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.parquet"

    def _check_input(self, number: int) -> None:
        path = self._path(number)
        try:
            notes = _parquet().read_schema(path).metadata or {}
        except (OSError, ValueError) as error:  # pyarrow's errors are of both
            remedy = "remove it, and the same command writes it again"
            raise DataError(f"output={str(path)!r}: is no complete Parquet file; {remedy}") from error
        for name, digest in self._digests[number].items():
            # Folders that earlier versions began have no FILES
            if notes.get(name, digest.encode() if name == FILES else b"") != digest.encode():
                raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        remedy = "images were added, removed, renamed or replaced since: choose another folder, or remove its parts"
        return DataError(f"output={str(self._path(number))!r}: was written from other images; {remedy}")

    def _write_job(self, text: str) -> None:
        path = self.folder / JOB
        if path.exists():
            return
        fresh = self.folder / f".{JOB}.{secrets.token_hex(4)}"
        fresh.write_text(text)
        synchronize(fresh)
        try:
            os.link(fresh, path)  # does not replace the file of a faster process
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            fresh.replace(path)
        fresh.unlink(missing_ok=True)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()


def _file_states(rows: Sequence[ImageRow]) -> list[tuple[int, int] | None]:
    """The size and time of the file of each image; None for one that cannot be read."""

    @cache
    def state(path: str) -> tuple[int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    return [state(row.member.tar if row.member else row.path) for row in rows]


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ArgumentError.of("output", str(folder), "is a file; give a folder, or a name that ends in .csv")
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    if names and JOB not in names:
        remedy = f"holds {names[0]}, and no {JOB} of a prediction; choose another folder, or a name that ends in .csv"
        raise ArgumentError.of("output", str(folder), remedy)


def _parquet() -> Any:
    with needs("a folder of Parquet files", "pyarrow", "parquet"):
        from pyarrow import parquet
    return parquet


def _arrow_table(table: Mapping[str, Column], notes: Mapping[bytes, str]) -> Any:
    import pyarrow as pa

    # Types do not depend on values, of which a part may have none
    kinds = {"location": pa.int64(), "logits": pa.list_(pa.float32()), "features": pa.list_(pa.float32())}
    kinds |= {"experts": pa.list_(pa.int32()), SET: pa.list_(pa.string()), ABSTAIN: pa.bool_()}

    def array(name: str, column: Column) -> Any:
        if isinstance(column, np.ndarray):
            ends = np.arange(len(column) + 1, dtype=np.int32) * column.shape[1]
            return pa.ListArray.from_arrays(ends, column.ravel())
        if name in ("path", STATUS) or name.startswith("class"):
            return pa.array([text and utf8(text) for text in column], pa.string())
        return pa.array(column, kinds.get(name, pa.float64()))

    return pa.table({name: array(name, column) for name, column in table.items()}).replace_schema_metadata(notes)
