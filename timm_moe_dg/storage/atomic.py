"""Atomic writes of files and folders, and the CSV and JSON text that goes into them.

New content is written beside the old, flushed to disk, and then renamed. A process that is killed leaves the old
content, or both under hidden names, which `recovered` cleans up.
"""

import csv
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isnan
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

from ..cli.text import csv_cell
from ..errors import ArgumentError, StorageError

EXCHANGE = "unfinished-exchange"  # folder of complete files on their way to the folder above it
REPLACED = ".replaced.json"  # names of the files that they replace
_logger = logging.getLogger(__name__)


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`, which replaces `target` if nothing is raised."""
    recovered(target)
    fresh, old = _beside(target)
    with explained(target):
        fresh.mkdir(parents=True)
        try:
            yield fresh
            _share_as_folder(fresh)
            for entry in [*fresh.rglob("*"), fresh]:
                synchronize(entry)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        synchronize(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recovered(target: Path) -> None:
    """Undoes a replacement of a folder that was killed half way, and removes its leftovers."""
    fresh, old = _beside(target)
    if old.exists() and not target.exists():
        old.rename(target)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Creates or replaces a file. After an error, an existing file is unchanged."""
    with explained(path), replaced_file(path) as fresh:
        fresh.write_text(text)


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yields the path of a hidden file beside `path`, which replaces `path` if nothing is raised."""
    fresh, _ = _beside(path)
    try:
        yield fresh
        synchronize(fresh)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    synchronize(path.parent)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file. A kill may cut the line; an error leaves the file as it was."""
    # Unbuffered, because a buffer would write again when the file is closed
    with explained(path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            rest = line.encode() + b"\n"
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            os.truncate(path, end)
            raise


@contextmanager
def all_or_nothing(folder: str | os.PathLike[str], names: Iterable[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary folder, whose files move to `folder` if nothing is raised.

    Enter it before the work starts, so that an unusable folder is refused at once. Files called `names` may be there
    with `overwrite` alone, and are all replaced or removed. Other files in the folder stay as they are. If the process
    is killed while files move, the next call for the folder moves the rest.
    """
    target, names = Path(folder), list(names)
    if (target / EXCHANGE).is_dir():
        _exchange(target)
        _logger.warning(f"{target}: files of an interrupted call were moved to their places")
    present = [name for name in names if (target / name).exists()]
    if present and not overwrite:
        raise ArgumentError.of("output", str(target), f"holds {', '.join(present)} already; choose another, or --force")
    folders = [name for name in present if (target / name).is_dir()]
    if folders:
        raise ArgumentError.of("output", str(target), f"holds a folder called {', '.join(folders)}; choose another")
    created = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        work = target / f".unfinished-{os.getpid()}-{secrets.token_hex(4)}"
        work.mkdir()
    except OSError as error:
        raise ArgumentError.of("output", str(target), f"cannot be written ({error}); choose another") from error
    try:
        yield work
        _share_as_folder(work)
        if len(names) == 1:
            os.replace(work / names[0], target / names[0])
        else:
            (work / REPLACED).write_text(json.dumps(names))
            for entry in [*work.iterdir(), work]:
                synchronize(entry)
            work.rename(target / EXCHANGE)
            _exchange(target)
    except KeyboardInterrupt:
        if (target / EXCHANGE).exists():
            raise KeyboardInterrupt(f"{target} is incomplete; the same command completes it") from None
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if created and not any(target.iterdir()):
            target.rmdir()


def _exchange(target: Path) -> None:
    """Moves new files to their places. The old ones go first, so that none ever lies beside a new one."""
    fresh = target / EXCHANGE
    for name in _replaced_names(target):
        (target / name).unlink(missing_ok=True)
    (fresh / REPLACED).unlink(missing_ok=True)
    for file in sorted(fresh.iterdir()):
        os.replace(file, target / file.name)
    fresh.rmdir()


def _replaced_names(target: Path) -> list[str]:
    """Names of the files that an exchange replaces. Its folder may be foreign, and paths in it are refused."""
    fresh = target / EXCHANGE
    with suppress(ValueError, RecursionError):  # not JSON
        names = json.loads((fresh / REPLACED).read_text()) if (fresh / REPLACED).exists() else []
        if not fresh.is_symlink() and isinstance(names, list) and all(map(_is_file_name, names)):
            return names
    remedy = f"{EXCHANGE} is a link, or its {REPLACED} is no list of file names; remove it, or choose another folder"
    raise ArgumentError.of("output", str(target), remedy)


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name == Path(name).name not in ("", "..") and "\0" not in name


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turns a failed write into a `StorageError` that names the file and a remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"output={str(target)!r}: cannot be written ({error}); what was saved before is intact: free some space or "
            "correct the permissions, then go on with --resume"
        ) from error


def synchronize(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on disk."""
    if os.name == "nt":  # Windows opens no folders, and flushes no file that was opened for reading
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_rows(file: TextIO, rows: Iterable[Iterable[object]]) -> None:
    """Writes CSV rows, header included, into an open file. Texts are escaped by `csv_cell`."""
    csv.writer(file, lineterminator="\n").writerows(
        [csv_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows
    )


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Writes a CSV file; see `write_rows`."""
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        write_rows(file, rows)


def json_text(value: object, indent: int | None = None) -> str:
    """Formats tables, lists, texts and numbers as JSON with a final line break. NaN, which JSON lacks, becomes null."""
    return json.dumps(_without_nan(value), indent=indent) + "\n"


def _without_nan(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value


def _beside(target: Path) -> tuple[Path, Path]:
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    return fresh, old


def _share_as_folder(folder: Path) -> None:
    """Gives the files of a folder the folder's own permissions to read and write."""
    # safetensors creates files that only their owner may read. The umask, which says what others may do, cannot be
    # read without setting it for all threads, but the folder was created under it.
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)
