"""Checksums of the files of a folder, beside them: whether they are still what was written."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

CHECKSUMS = "checksums.json"


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Writes checksums.json, of every file below a folder; do so before the folder gets its final name."""
    (folder / CHECKSUMS).write_text(json.dumps(_computed(folder)))


def read_checksums(folder: Path) -> dict[str, str]:
    """Reads checksums.json: name of a file -> its SHA-256.

    Raises:
        OSError: It is not there, or cannot be read.
        ValueError: It is no such table.
    """
    return checked_table(json_of((folder / CHECKSUMS).read_text()), CHECKSUMS)


def known_checksums(folder: Path) -> dict[str, str]:
    """Returns what checksums.json says; where there is none, of an earlier release, the files' checksums of now."""
    try:
        return read_checksums(folder)
    except (OSError, ValueError):
        return _computed(folder)


def json_of(text: str) -> object:
    """Reads JSON; whatever is wrong with it, its depth included, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def checked_table(table: object, name: str) -> dict[str, str]:
    """Makes sure that JSON is a table of checksums that lists something.

    Raises:
        ValueError: It is not; `name` is in the message.
    """
    if not isinstance(table, dict) or not table or not all(isinstance(value, str) for value in table.values()):
        raise ValueError(f"{name} lists no checksums")
    return table


def damage(folder: Path, needed: Iterable[str] = ()) -> str | None:
    """Says what of a folder is not what was written.

    Args:
        folder: As `write_checksums` left it.
        needed: Names of files that have to be listed.

    Returns:
        A phrase; None if all files are as they were.
    """
    try:
        listed = read_checksums(folder)
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS}: {error}"
    unlisted = [name for name in needed if name not in listed]
    return f"{CHECKSUMS} does not list {', '.join(unlisted)}" if unlisted else first_difference(folder, listed)


def first_difference(folder: Path, expected: Mapping[str, str]) -> str | None:
    """Names the first file of a folder that is missing or has another checksum; None if there is none.

    Args:
        folder: The folder.
        expected: Name of a file in it -> its SHA-256.
    """
    for name, checksum in expected.items():
        try:
            found = file_hash(folder / name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != checksum:
            return f"{name} is not what was written"
    return None


def _computed(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    return {path.relative_to(folder).as_posix(): file_hash(path) for path in files}
