"""The file `done` of a finished run: that it is, and what it vouches for, the SHA-256 of each file by name.

Before there were checksums it held the word "done", as DomainBed's does: such a run is finished, and vouches for
nothing.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from ..errors import CheckpointError
from .atomic import explained, write_text
from .checksums import CHECKSUMS, checked_table, damage, file_hash, first_difference, json_of, known_checksums

DONE = "done"
_OLDER = ("", "done")


def vouch(run: Path, files: Iterable[str], folders: Iterable[str]) -> None:
    """Writes `done`.

    Args:
        run: The folder.
        files: Names of the files to vouch for, which are read.
        folders: Names of folders with checksums of their own, which are taken over where they are there.
    """
    with explained(run / DONE):
        table = {name: file_hash(run / name) for name in files}
        for folder in folders:
            table |= {f"{folder}/{name}": checksum for name, checksum in known_checksums(run / folder).items()}
    write_text(run / DONE, json.dumps({"files": table}, indent=1) + "\n")


def vouched(run: Path) -> dict[str, str]:
    """Reads what a run vouches for: name -> SHA-256; empty for a run without checksums, or one that is not finished.

    Raises:
        CheckpointError: `done` is not what a run has written.
    """
    try:
        text = (run / DONE).read_text()
        if text.strip() in _OLDER:
            return {}
        table = json_of(text)
        return checked_table(table.get("files") if isinstance(table, dict) else None, DONE)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"run={str(run)!r}: {DONE} is not what was written ({error})") from error


def lost(run: Path, *names: str) -> str | None:
    """Says what a finished run vouches for and no longer has.

    Args:
        run: The folder.
        *names: Look at these files and folders alone.

    Returns:
        A phrase about the first such file; None if there is none.
    """
    try:
        expected = vouched(run)
    except CheckpointError as error:
        return str(error)
    wanted = {name: sha for name, sha in expected.items() if not names or {name, name.partition("/")[0]} & set(names)}
    return first_difference(run, wanted)


def verify_model(model: str) -> None:
    """Makes sure that the folder of a `local-dir:` model holds what was written; other sources are not looked at.

    A folder without checksums, of an earlier release or of another program, is taken as it is.

    Raises:
        CheckpointError: It does not.
    """
    source, _, place = model.partition(":")
    folder = Path(place)
    if source != "local-dir" or not folder.is_dir():
        return
    found = _differing(folder) and _differing(folder)  # a run in progress may have replaced it while it was read
    if found:
        remedy = "train it again; evaluate.py, predict.py and export.py take it as it is with --no-verify"
        raise CheckpointError(f"model={model!r}: is damaged ({found}); {remedy}")


def _differing(folder: Path) -> str | None:
    own = damage(folder) if (folder / CHECKSUMS).exists() else None
    return own or lost(folder.parent, folder.name)
