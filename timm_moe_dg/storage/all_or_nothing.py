"""Result files: all of them complete under their final names, or none."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArgumentError


@contextmanager
def delivered(folder: str | os.PathLike[str], names: Iterable[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a temporary folder to write into; what is in it moves to `folder` if nothing is raised.

    Enter it before the work whose results it takes: it refuses at once what it would have to refuse at the end.

    Args:
        folder: Created if need be. Other files in it stay as they are.
        names: Of the files to come.
        overwrite: Whether files with these names may be replaced.

    Raises:
        ArgumentError: Such a file exists already, or there can be no such folder.
    """
    target = Path(folder)
    present = [name for name in names if (target / name).exists()]
    if present and not overwrite:
        raise ArgumentError.of("output", str(target), f"holds {', '.join(present)} already; choose another, or --force")
    created = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target))
    except OSError as error:
        raise ArgumentError.of("output", str(target), f"cannot be written ({error}); choose another") from error
    try:
        yield work
        for file in sorted(work.iterdir()):
            os.replace(file, target / file.name)
    finally:
        shutil.rmtree(work)
        if created and not any(target.iterdir()):
            target.rmdir()
