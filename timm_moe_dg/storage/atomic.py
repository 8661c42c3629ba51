"""Writing files and folders so that, at every moment, what is there under its name is complete.

New content is written beside the old one, put on the disk, and only then given the name. A process that is killed
leaves the old content, or at worst both under names that start with a dot, which `recovered` settles.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..errors import StorageError


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Gives a fresh folder beside `target` to write into, which takes the place of `target` if nothing is raised.

    Raises:
        StorageError: The folder cannot be written; `target` is then as it was.
    """
    recovered(target)
    fresh, old = _beside(target)
    with explained(target):
        fresh.mkdir(parents=True)
        try:
            yield fresh
            _synchronise(fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        _synchronise_entry(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def recovered(target: Path) -> None:
    """Puts back a folder that an earlier process was killed while replacing, and removes what it left beside it."""
    fresh, old = _beside(target)
    if old.exists() and not target.exists():
        old.rename(target)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Replaces a file, or creates it.

    Raises:
        StorageError: The file cannot be written; what was there stays.
    """
    fresh, _ = _beside(path)
    with explained(path):
        try:
            fresh.write_text(text)
            _synchronise_entry(fresh)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        _synchronise_entry(path.parent)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, or nothing.

    Raises:
        StorageError: The line cannot be written.
    """
    with explained(path), path.open("ab", buffering=0) as file:  # a buffer would try again when the file is closed
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
def explained(target: Path) -> Iterator[None]:
    """Turns what the system says about a failed write into an error that names the file and a remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"output={str(target)!r}: cannot be written ({error}); what was saved before is intact: free some space or "
            "correct the permissions, then go on with --resume"
        ) from error


def _beside(target: Path) -> tuple[Path, Path]:
    fresh, old = (target.with_name(f".{target.name}.{kind}") for kind in ("new", "old"))
    return fresh, old


def _synchronise(folder: Path) -> None:
    for entry in [*folder.rglob("*"), folder]:
        _synchronise_entry(entry)


def _synchronise_entry(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
