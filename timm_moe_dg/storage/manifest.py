"""A folder of files with a manifest of their hashes, made by a long job that may be killed and started again.

Each file is written beside its place, moved there, and recorded in a journal. Who opens the folder again checks every
recorded file by size and hash and makes anew what is missing or differs, so nothing depends on what a crash left.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from ..errors import ArgumentError, StorageError
from .atomic import append_line, write_text
from .checksums import file_hash

MANIFEST, JOURNAL = "manifest.json", "manifest.unfinished.jsonl"


class Entry(TypedDict):
    """What is recorded of a file."""

    size: int
    sha256: str


class Manifest:
    """The files of a folder, by name.

    Args:
        folder: Created if need be.
        identity: What the files are made from and how; a folder whose manifest says otherwise is refused. Of JSON.

    Raises:
        ArgumentError: The folder holds something else, or cannot be written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, object]) -> None:
        self.folder = folder
        self.identity = dict(identity)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            recorded = self._recorded()
            self.files = {name: entry for name, entry in recorded.items() if self._intact(name, entry)}
            lines = [json.dumps(self.identity), *map(json.dumps, self.files.items())]
            write_text(folder / JOURNAL, "\n".join(lines) + "\n")
        except OSError as error:  # StorageError is one
            reason = error.__cause__ or error
            raise ArgumentError.of("output", str(folder), f"cannot be written ({reason}); choose another") from error

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def write(self, name: str, content: bytes) -> None:
        """Writes a file and records it.

        Raises:
            StorageError: The disk is full, or the folder may not be changed any more.
        """
        self._place(name, lambda beside: beside.write_bytes(content))

    def link(self, name: str, source: Path) -> None:
        """Makes a symbolic link to a file and records the file's content; see `write`."""
        self._place(name, lambda beside: beside.symlink_to(source.resolve()))

    def finish(self, facts: Mapping[str, object]) -> None:
        """Writes manifest.json: the identity, further facts, and size and SHA-256 of each file, sorted by name."""
        table = {**self.identity, **facts, "files": dict(sorted(self.files.items()))}
        write_text(self.folder / MANIFEST, json.dumps(table, indent=1) + "\n")
        (self.folder / JOURNAL).unlink()

    def _place(self, name: str, make: Callable[[Path], object]) -> None:
        path = self.folder / name
        beside = path.with_name(f".{path.name}.new")  # no image's extension, so that no reader takes it for one
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.unlink(missing_ok=True)
            make(beside)
            os.replace(beside, path)
            self.files[name] = {"size": path.stat().st_size, "sha256": file_hash(path)}
            append_line(self.folder / JOURNAL, json.dumps([name, self.files[name]]))
        except OSError as error:
            reason = error.__cause__ or error
            remedy = "free some space or correct the permissions, then run the same command again; it goes on from here"
            raise StorageError(f"output={str(path)!r}: cannot be written ({reason}); {remedy}") from error

    def _recorded(self) -> dict[str, Entry]:
        """What an earlier start recorded; nothing for a fresh folder."""
        if (self.folder / JOURNAL).is_file():
            lines = [line for line in (self.folder / JOURNAL).read_text().split("\n")[:-1] if line]  # the rest is torn
            identity, files = _parsed(lines[0]) if lines else None, dict(filter(None, map(_parsed, lines[1:])))
        elif (self.folder / MANIFEST).is_file():
            table = _parsed((self.folder / MANIFEST).read_text())
            files = table.pop("files", {}) if isinstance(table, dict) else {}
            identity = {key: table.get(key) for key in self.identity} if isinstance(table, dict) else None
        elif any(self.folder.iterdir()):
            remedy = f"holds files but no {MANIFEST}; choose an empty folder"
            raise ArgumentError.of("output", str(self.folder), remedy)
        else:
            return {}
        self._check(identity)
        return files

    def _check(self, found: object) -> None:
        theirs = found if isinstance(found, dict) else {}
        differing = [key for key, value in self.identity.items() if theirs.get(key) != value]
        if differing:
            remedy = f"holds the manifest of another data set ({', '.join(differing)} differ); choose another folder"
            raise ArgumentError.of("output", str(self.folder), remedy)

    def _intact(self, name: str, entry: Entry) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == entry["size"] and file_hash(path) == entry["sha256"]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
