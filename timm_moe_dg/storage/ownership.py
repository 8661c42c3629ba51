"""One owner per folder: locks that die with their process, and that whoever only looks does not take.

A run folder's lock is on the file `.NAME.lock` beside it, for there is no folder before the first evaluation. The lock
is the system's (flock), so it ends with its process however that ends; the file stays where a run is unfinished, and
says when it was begun among others. On NFS it holds between machines (Linux makes it a lock of the server's), and that
of a machine that crashed ends when the server's lease does; mounts with `nolock` or `local_lock` hold on one machine
alone. Where a file system has no locks at all, a message says so.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import FolderInUseError
from .atomic import explained

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LOOKING = 0.001  # seconds; who looks holds the lock for microseconds
_held: set[int] = set()
_logger = logging.getLogger(__name__)


def _let_go() -> None:
    """Closes in a forked child what only its parent is to hold: workers may outlive a process that was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def owned(folder: Path, done: str = "done") -> Iterator[None]:
    """Makes this process the only one that writes to a folder, until the context is left.

    Args:
        folder: Need not exist; what is created above it goes again if it stays empty.
        done: File in it that says that nothing is left to do.

    Raises:
        FolderInUseError: Another process is the owner.
        StorageError: The lock's file cannot be written.
    """
    path = lock_file(folder)
    created = [parent for parent in path.parents if not parent.exists()]
    with explained(path):
        descriptor = _take(path)
        if descriptor is None:
            raise FolderInUseError.of("output", str(folder), f"is in use by {_owner(path)}; {_REMEDY}")
        _held.add(descriptor)
    try:
        with explained(path):
            _sign(path, descriptor)
        yield
    finally:
        with suppress(OSError):  # whoever comes next takes a file that is left over
            if not folder.is_dir() or (folder / done).exists():
                path.unlink()
            for parent in created:
                parent.rmdir()
        _held.discard(descriptor)
        os.close(descriptor)


_REMEDY = "wait until that has ended, or give another --output or --experiment"


def is_owned(folder: Path) -> bool:
    """Whether a process is the owner of a folder; asking never keeps one from becoming it."""
    return is_locked(lock_file(folder))


def lock_file(folder: Path) -> Path:
    """The file that the lock of a folder is on; links to the folder lead to the same one."""
    whole = folder.resolve()
    return whole.with_name(f".{whole.name}.lock")


def start_number(folder: Path) -> int:
    """A number that is larger the later an unfinished run was begun or resumed; 0 where that is not known.

    Clocks have no part in it.
    """
    return _number(lock_file(folder))


def try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file; False if another process has it. Waits for those that are only looking."""
    while not _flock(descriptor, fcntl.LOCK_EX):
        if not _flock(descriptor, fcntl.LOCK_SH):  # an owner excludes this as well, who only looks does not
            return False
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        time.sleep(_LOOKING)
    return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file; no file is not locked."""
    try:
        with path.open("rb") as file:
            return not _flock(file.fileno(), fcntl.LOCK_SH)
    except OSError:
        return False


def _flock(descriptor: int, operation: int) -> bool:
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _logger.warning(f"this file system has no locks ({error.strerror}); nothing keeps two runs apart here")
    return True


def _take(path: Path) -> int | None:
    """Opens a file, creates it if need be, and takes its lock; None if another process has it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # an owner that ended has just removed the folder above
            continue
        if not try_lock(descriptor):
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # its owner has just removed the file


def _sign(path: Path, descriptor: int) -> None:
    number = 1 + max(map(_number, path.parent.glob(".*.lock")), default=0)
    text = json.dumps({"number": number, "process": os.getpid(), "host": socket.gethostname()})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _signed(path: Path) -> dict[str, object]:
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _number(path: Path) -> int:
    number = _signed(path).get("number")
    return number if isinstance(number, int) else 0


def _owner(path: Path) -> str:
    signed = _signed(path)
    return f"process {signed.get('process', '(unknown)')} on {signed.get('host', '(unknown)')}"
