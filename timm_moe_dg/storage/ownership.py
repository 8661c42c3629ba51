"""Run-folder locks, released by the system when the process exits, however it exits.

The lock of a folder is a file beside it, because a run has no folder before its first evaluation.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import FolderInUseError
from .atomic import explained

# Seconds. `is_owned` takes the lock for microseconds, which must not fail a run that starts at that moment.
_PATIENCE = 1.0


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
            holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            remedy = "wait until that has ended, or give another --output or --experiment"
            raise FolderInUseError.of("output", str(folder), f"is in use by {_holder(holder)}; {remedy}") from None
        except OSError:
            lock.release()
            raise
    try:
        yield
    finally:
        _remove(path)
        with suppress(OSError):
            for parent in created:
                parent.rmdir()
        lock.release()


def _remove(path: Path) -> None:
    """Removes the files of a lock that is held: after its release they may be another process's."""
    with suppress(OSError):  # Windows removes no open file; a file that is left over locks nothing
        path.with_suffix(".owner").unlink(missing_ok=True)
        path.unlink()


def is_owned(folder: Path) -> bool:
    """Whether another process, or this one, holds the lock of a folder. The files of a killed owner are removed."""
    path = lock_file(folder)
    if not path.exists():
        path.with_suffix(".owner").unlink(missing_ok=True)
        return False
    try:
        with FileLock(path, blocking=False):
            _remove(path)
            return False
    except (Timeout, PermissionError):  # another user's lock cannot be tried
        return True


def lock_file(folder: Path) -> Path:
    """The lock's file; all links to the folder lead to the same one."""
    target = folder.resolve()
    return target.with_name(f".{target.name}.lock")


def _holder(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the other process has not written it yet
        return "another process"
