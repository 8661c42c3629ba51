"""Atomic writes of files and folders, locks of folders, and the CSV and JSON text of files.

New content is written beside the old, flushed to disk, and then renamed. A process that is killed leaves the old
content, or both under hidden names, which `recovered` cleans up. Locks are released by the system when their process
exits, however it exits. The lock of a folder is a file beside it, because a run has no folder before its first
evaluation.
"""

import csv
import json
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isnan
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..cli.text import csv_cell
from ..errors import ArgumentError, FolderInUseError, MoeDgError, StorageError

EXCHANGE = "unfinished-exchange"  # folder of complete files on their way to the folder above it
REPLACED = ".replaced"  # folder in it, of empty files with the names of those that they replace
# Seconds. `is_owned` takes the lock for microseconds, which must not fail a run that starts at that moment.
_PATIENCE = 1.0
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
    if folders := [name for name in present if (target / name).is_dir()]:
        raise ArgumentError.of("output", str(target), f"holds a folder called {', '.join(folders)}; choose another")
    created = not target.exists()
    work = target / f".unfinished-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise ArgumentError.of("output", str(target), f"cannot be written ({error}); choose another") from error
    try:
        yield work
        _share_as_folder(work)
        if len(names) == 1:  # other calls may write files of other names at the same time
            os.replace(work / names[0], target / names[0])
            return
        (work / REPLACED).mkdir()
        for name in names:
            (work / REPLACED / name).touch()
        for entry in [*work.rglob("*"), work]:
            synchronize(entry)
        work.rename(target / EXCHANGE)
        _exchange(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if created and not any(target.iterdir()):
            target.rmdir()


def _exchange(target: Path) -> None:
    """Moves new files to their places. The old ones go first, so that none ever lies beside a new one."""
    fresh = target / EXCHANGE
    if fresh.is_symlink():  # made by something else
        raise ArgumentError.of("output", str(target), f"holds a link called {EXCHANGE}; remove it, or choose another")
    if (fresh / REPLACED).is_dir():
        for name in os.listdir(fresh / REPLACED):
            (target / name).unlink(missing_ok=True)
        shutil.rmtree(fresh / REPLACED)
    for file in sorted(fresh.iterdir()):
        os.replace(file, target / file.name)
    fresh.rmdir()


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder or file, which need not exist, until the context is left.

    Folders above it are created, and removed again if they stay empty. If another process holds the lock, a
    `FolderInUseError` is raised.
    """
    path, holder = lock_file(folder), lock_file(folder).with_suffix(".owner")
    lock = FileLock(path)
    created = [parent for parent in path.parents if not parent.exists()]
    with explained(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_PATIENCE)
        except Timeout:
            name = "another process"
            with suppress(OSError):  # it has not written its name yet
                name = holder.read_text()
            remedy = "wait until that has ended, or give another --output or --experiment"
            raise FolderInUseError.of("output", str(folder), f"is in use by {name}; {remedy}") from None
    try:
        with suppress(OSError):  # a full disk
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        _remove(path)
        with suppress(OSError):
            for parent in created:
                parent.rmdir()
        lock.release()


def is_owned(folder: Path) -> bool:
    """Whether another process, or this one, holds the lock of a folder. The files of a killed owner are removed."""
    path = lock_file(folder)
    if not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            _remove(path)
            return False
    except (Timeout, PermissionError):  # another user's lock cannot be tried
        return True


def _remove(path: Path) -> None:
    """Removes the files of a lock that is held: after its release they may be another process's."""
    with suppress(OSError):  # Windows removes no open file; a file that is left over locks nothing
        path.with_suffix(".owner").unlink(missing_ok=True)
        path.unlink()


def lock_file(folder: Path) -> Path:
    """The lock's file; all links to the folder lead to the same one."""
    target = folder.resolve()
    return target.with_name(f".{target.name}.lock")


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Turns a failed write into a `StorageError` that names the file and a remedy."""
    try:
        yield
    except MoeDgError:
        raise
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"output={str(target)!r}: cannot be written ({error}); what was saved before is intact: free some space or "
            "correct the permissions, then give the command again, a run with --resume"
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
    with path.open("w", newline="", encoding="utf-8") as file:
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
