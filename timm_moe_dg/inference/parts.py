"""Folders of predictions: Parquet files of a fixed number of images, which any number of processes write.

A part that exists is finished. It is written under a hidden name and then renamed. No process talks to another.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, DataError, StorageError, needs
from ..storage.files import json_text, synchronize
from .certainty import ABSTAIN, SET
from .image_rows import ImageRow
from .predictor import STATUS, Column, Part

JOB = "_job.json"  # readers of Parquet folders skip names with an underscore
INPUT, UNREADABLE = b"input", b"unreadable"  # entries of a part's metadata
_NAME = re.compile(r"part-(\d+)\.parquet")


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
    """The folder of a job, which is new, empty, or of the same job; see `check_folder`.

    Args:
        folder: It is made if needed.
        job: Everything that the parts depend on, ready for JSON.
    """

    def __init__(self, folder: Path, job: Mapping[str, object]) -> None:
        _parquet()
        self.folder, self.total = folder, 0
        self._digests: list[str] = []  # of the input of each part, of all shards
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
            self._digests.append(hashlib.sha256(repr(rows).encode(errors="surrogateescape")).hexdigest())
            if number % shard.step != shard.first:
                continue
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
        notes = {INPUT: self._digests[part.number], UNREADABLE: json.dumps(part.unreadable)}
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
        if notes.get(INPUT) != self._digests[number].encode():
            raise self._changed(number)

    def _changed(self, number: int) -> DataError:
        remedy = "images were added, removed or renamed since: choose another folder, or remove its parts"
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


def check_folder(folder: Path) -> None:
    """Refuses a file, and a folder of something else than parts."""
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

    def array(name: str, column: Column) -> Any:
        if isinstance(column, np.ndarray):
            ends = np.arange(len(column) + 1, dtype=np.int32) * column.shape[1]
            return pa.ListArray.from_arrays(ends, column.ravel())
        texts = name in ("path", STATUS) or name.startswith("class")
        return pa.array(map(_utf8, column) if texts else column, pa.string() if texts else _type(name))

    return pa.table({name: array(name, column) for name, column in table.items()}).replace_schema_metadata(notes)


def _type(name: str) -> Any:
    """Types do not depend on values, of which a part may have none."""
    import pyarrow as pa

    kinds = {"location": pa.int64(), "logits": pa.list_(pa.float32()), "features": pa.list_(pa.float32())}
    kinds |= {"experts": pa.list_(pa.int32()), SET: pa.list_(pa.string()), ABSTAIN: pa.bool_()}
    return kinds.get(name, pa.float64())


def _utf8(text: str | None) -> str | None:
    return text and text.encode(errors="surrogateescape").decode(errors="backslashreplace")
