"""A Hugging Face Hub on this machine: enough of its protocol for the real client to download, create and commit."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from safetensors.torch import save_file
from torch import Tensor

USER = "someone"
TOKEN = "hf_the_token_that_may_write"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other", "unknown"}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}


class Commit(NamedTuple):
    """All files of a repository at one time, and the names of those that the commit sent."""

    sha: str
    files: dict[str, bytes]
    summary: str = ""
    sent: tuple[str, ...] = ()


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

    def add(self, revision: str, lines: list[dict[str, Any]]) -> Commit:
        """Applies the lines of a commit request."""
        header, *operations = (line["value"] for line in lines)
        commits = self.branches[revision]
        files = {value["path"]: base64.b64decode(value["content"]) for value in operations}
        sha = hashlib.sha1(f"{revision} {len(commits)} {commits[-1].sha}".encode()).hexdigest()
        commits.append(Commit(sha, {**commits[-1].files, **files}, header["summary"], tuple(files)))
        return commits[-1]


@dataclass
class LocalHub:
    """What the server keeps and what it was asked for.

    Attributes:
        repositories: By 'owner/name', and 'space:owner/name'.
        endpoint: For the client's HF_ENDPOINT.
        requests: 'METHOD path' of each request, in order.
        breaks_commits: Whether the connection breaks half-way through a commit.
    """

    repositories: dict[str, Repository]
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    breaks_commits: bool = False

    def commits(self, repository: str, branch: str = "main") -> list[str]:
        """What was committed to a branch since the repository was made: one summary a commit."""
        return [commit.summary for commit in self.repositories[repository].branches[branch][1:]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing on the tests' output."""

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path).strip("/").replace("api/spaces/", "api/models/space:")
        path = re.sub("^spaces/", "space:", path)
        for method, pattern, handle in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return handle(self, *match.groups())
        return self._send(404, {"X-Error-Code": "EntryNotFound"})

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _may_write(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._json({"error": "Invalid username or password."}, 401)
        return False

    def _find(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            self._send(401, {"X-Error-Code": "RepoNotFound"})
            return None
        return repository

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(content).encode())

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (repository := self._find(name)) is None:
            return None
        commit = repository.at(revision)
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if path not in commit.files:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.sha})
        content = commit.files[path]
        etag = f'"{_object_id(content)}"'
        return self._send(200, {"ETag": etag, "X-Repo-Commit": commit.sha}, content)

    def whoami(self) -> None:
        if self._may_write():
            self._json({"name": USER, "type": "user"})

    def create(self) -> None:
        wanted = json.loads(self._read())
        if not self._may_write():
            return None
        name = f"{wanted['organization'] or USER}/{wanted['name']}"
        name = f"space:{name}" if wanted.get("type") == "space" else name
        exists = name in self.hub.repositories
        if not exists:
            self.hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        address = f"{self.hub.endpoint}/{name.replace('space:', 'spaces/')}"
        return self._json({"url": address}, 409 if exists else 200)

    def validate(self) -> None:
        mistakes = card_mistakes(json.loads(self._read())["content"])
        errors = [{"message": mistake} for mistake in mistakes]
        self._json({"errors": errors, "warnings": []}, 400 if mistakes else 200)

    def info(self, name: str, revision: str | None) -> None:
        if (repository := self._find(name)) is None:
            return None
        commit = repository.at(revision or "main")
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in commit.files]
        for file in siblings:
            if file["rfilename"].endswith(".safetensors"):
                content = commit.files[file["rfilename"]]
                digest = hashlib.sha256(content).hexdigest()
                file["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 1}
        return self._json({"id": name, "sha": commit.sha, "private": repository.private, "siblings": siblings})

    def branch(self, name: str, branch: str) -> None:
        self._read()
        repository = self._find(name)
        if repository is None or not self._may_write():
            return None
        exists = branch in repository.branches
        repository.branches.setdefault(branch, repository.branches["main"][-1:])
        return self._json({}, 409 if exists else 200)

    def preupload(self, name: str, revision: str) -> None:
        wanted = json.loads(self._read())["files"]
        repository = self._find(name)
        commit = repository.at(revision) if repository else None
        if commit is None or not self._may_write():
            return None
        there = commit.files
        answer = [
            {
                "path": path,
                "uploadMode": "regular",
                "shouldIgnore": False,
                "oid": _object_id(there[path]) if path in there else None,
            }
            for path in (file["path"] for file in wanted)
        ]
        return self._json({"files": answer})

    def commit(self, name: str, revision: str) -> None:
        lines = [json.loads(line) for line in self._read().splitlines()]
        repository = self._find(name)
        if repository is None or not self._may_write():
            return None
        answer: dict[str, str | None] = {"pullRequestUrl": None}
        if "create_pr" in parse_qs(urlsplit(self.path).query):
            number = len(repository.branches)
            repository.branches[f"refs/pr/{number}"] = repository.branches["main"][-1:]
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.hub.endpoint}/{name}/discussions/{number}"
        if self.hub.breaks_commits:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return None
        commit = repository.add(revision, lines)
        address = f"{self.hub.endpoint}/{name.replace('space:', 'spaces/')}/commit/{commit.sha}"
        return self._json({**answer, "commitOid": commit.sha, "commitUrl": address})


_NAME = r"([^/]+/[^/]+)"
_ROUTES = (
    ("GET", "api/whoami-v2", _Handler.whoami),
    ("POST", "api/repos/create", _Handler.create),
    ("POST", "api/validate-yaml", _Handler.validate),
    ("GET", rf"api/models/{_NAME}(?:/revision/(.+))?", _Handler.info),
    ("POST", rf"api/models/{_NAME}/branch/(.+)", _Handler.branch),
    ("POST", rf"api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"api/models/{_NAME}/commit/(.+)", _Handler.commit),
    ("HEAD GET", rf"{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
)


def _object_id(content: bytes) -> str:
    """Git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve() -> Iterator[LocalHub]:
    """Runs an empty hub on a free port of this machine."""
    hub = LocalHub({})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
    return wrong


def fill_cache(cache: Path, repository: str, state_dict: dict[str, Tensor]) -> None:
    """Puts a repository with one `model.safetensors` into a cache, to be read with HF_HUB_CACHE and HF_HUB_OFFLINE."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / name).mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    save_file(state_dict, folder / "snapshots" / COMMIT / "model.safetensors")
