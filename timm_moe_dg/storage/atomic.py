"""Writing files and folders so that, at every moment, what is there under its name is complete.

New content is written beside the old one, put on the disk, and only then given the name. A process that is killed
leaves the old content, or at worst both under names that start with a dot, which `recovered` settles.
`all_or_nothing` is for a tool's result files, which appear together or not at all.
"""

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..errors import ArgumentError, StorageError


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
            _share_as_folder(fresh)
            _synchronize(fresh)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        _synchronize_entry(target.parent)
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
            _synchronize_entry(fresh)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        _synchronize_entry(path.parent)


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file atomically.

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
def all_or_nothing(folder: str | os.PathLike[str], names: Iterable[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a temporary folder to write into; what is in it moves to `folder` if nothing is raised.

    Enter it before the work whose results it takes: it refuses at once what it would have to refuse at the end.

    Args:
        folder: Created if need be. Other files in it stay as they are.
        names: Of the files to come.
        overwrite: Whether files with these names may be replaced.

    Raises:
        ArgumentError: Such a file exists already, or a folder of its name, or there can be no such folder.
    """
    target = Path(folder)
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
        for file in sorted(work.iterdir()):
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(work)
        if created and not any(target.iterdir()):
            target.rmdir()


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


def _share_as_folder(folder: Path) -> None:
    """Gives the files of a folder its own modes of reading and writing; safetensors' are the owner's alone.

    The folder was made as the umask says, which cannot be read without being changed for all threads.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def _synchronize(folder: Path) -> None:
    for entry in [*folder.rglob("*"), folder]:
        _synchronize_entry(entry)


def _synchronize_entry(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
