"""Whether files that a process has written are still there as it left them, told by size and time: no file is read."""

import os
from pathlib import Path

from ..errors import StorageError


class Watch:
    """Remembers how files looked after they were written.

    Args:
        folder: That they are in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}

    def note(self, *names: str) -> None:
        """Takes the files of these names, and all files of folders of these names, as they look now."""
        for name in names:
            root = self._folder / name
            self._seen = {path: look for path, look in self._seen.items() if root not in (path, *path.parents)}
            found = (path for path in [root, *root.rglob("*")] if path.is_file())
            self._seen |= {path: _look(path) for path in found}

    def check(self) -> None:
        """Makes sure that all files look as they did.

        Raises:
            StorageError: One has been removed or changed meanwhile.
        """
        for path, before in self._seen.items():
            try:
                problem = "" if _look(path) == before else "changed"
            except OSError:
                problem = "removed"
            if problem:
                self._refuse(path, problem)

    def _refuse(self, path: Path, problem: str) -> None:
        if not self._folder.is_dir():
            remedy = "was removed while the run was writing to it; start the run again"
            raise StorageError(f"output={str(self._folder)!r}: {remedy}")
        name = path.relative_to(self._folder).as_posix()
        raise StorageError(
            f"output={str(self._folder)!r}: {name} was {problem} by something else while the run was writing here; "
            "nothing was written since; go on with --resume, which makes again what it can"
        )


def _look(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns
