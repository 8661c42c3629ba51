"""What a Hub on this machine keeps: repositories with commits on branches, and the large files they point to."""

import base64
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.hub_cache import COMMIT

LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other", "unknown"}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}


class Commit(NamedTuple):
    """All files of a repository at one time."""

    sha: str
    files: dict[str, bytes]
    summary: str = ""


@dataclass
class Repository:
    """One repository; its first commit is empty, or holds the files of a folder."""

    folder: Path | None = None
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        files = {}
        if self.folder:
            paths = [path for path in self.folder.rglob("*") if path.is_file()]
            files = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}
        self.branches["main"] = [Commit(COMMIT, files)]

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch's name or a commit's hash stands for."""
        if revision in self.branches:
            return self.branches[revision][-1]
        every = (commit for commits in self.branches.values() for commit in commits)
        return next((commit for commit in every if commit.sha == revision), None)

    def add(self, revision: str, lines: list[dict[str, Any]], objects: dict[str, bytes]) -> Commit:
        """Applies the lines of a commit request; raises KeyError if a large file was never received."""
        header, *operations = lines
        commits = self.branches[revision]
        files = dict(commits[-1].files)
        for operation in operations:
            value = operation["value"]
            large = operation["key"] == "lfsFile"
            files[value["path"]] = objects[value["oid"]] if large else base64.b64decode(value["content"])
        sha = hashlib.sha1(f"{revision} {len(commits)} {commits[-1].sha}".encode()).hexdigest()
        commits.append(Commit(sha, files, header["value"]["summary"]))
        return commits[-1]


def is_large(path: str) -> bool:
    """Whether the hub keeps a file apart from git."""
    return path.endswith((".safetensors", ".png"))


def object_id(path: str, content: bytes) -> str:
    """The hub's name for a file's content: of large files the SHA-256, of others git's own."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def card_mistakes(content: str) -> list[str]:
    """What is wrong with a card's metadata, by the Hub's published rules."""
    _, _, rest = content.partition("---\n")
    try:
        data = yaml.safe_load(rest.partition("\n---")[0])
    except yaml.YAMLError as error:
        return [f"no YAML: {error}"]
    if not isinstance(data, dict):
        return ["no metadata"]
    wrong = [] if data.get("license") in LICENSES else [f'"license" {data.get("license")} is not allowed']
    if ("base_model_relation" in data) and not (data["base_model_relation"] in RELATIONS and data.get("base_model")):
        wrong.append('"base_model_relation" needs a base model')
    for key in ("tags", "datasets"):
        if not all(isinstance(value, str) and value for value in data.get(key, [])):
            wrong.append(f'"{key}" must be strings')
    for entry in data.get("model-index", []):
        for result in entry["results"]:
            complete = result["task"].get("type") and all(result["dataset"].get(key) for key in ("type", "name"))
            numbers = all(metric.get("type") and isinstance(metric.get("value"), float) for metric in result["metrics"])
            if not (entry.get("name") and complete and result["metrics"] and numbers):
                wrong.append(f'"model-index" has an incomplete result: {json.dumps(result)}')
    return wrong
