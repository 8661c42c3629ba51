"""A Hugging Face Hub on this machine: enough of its protocol for the real client to download, create and commit.

Large files take the way they take on the Hub: downloads are redirected to another origin (a second port) with the
linked size and etag, uploads go there first and are then named in the commit.
"""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_repository import Repository, card_mistakes, is_large, object_id

USER = "someone"
TOKEN = "hf_the_token_that_may_write"


@dataclass
class LocalHub:
    """What the server keeps and what it was asked for.

    Attributes:
        repositories: By 'owner/name', and 'space:owner/name'.
        endpoint: For the client's HF_ENDPOINT.
        requests: 'METHOD path' of each request to either origin, in order.
        objects: Large files that were received, by SHA-256.
        drop: Given 'METHOD path' of a transfer to or from the storage, whether the connection breaks half-way.
    """

    repositories: dict[str, Repository]
    endpoint: str = ""
    storage: str = ""
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    drop: Callable[[str], bool] = lambda request: False

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

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing on the tests' output."""

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path).strip("/").replace("api/spaces/", "api/models/space:")
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
        if self.command == "HEAD":
            return
        if self.command == "GET" and status == 200 and self.hub.drop(f"GET {self.path}"):
            self.wfile.write(content[: len(content) // 2])
            self._hang_up()
        else:
            self.wfile.write(content)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def resolve(self, name: str, revision: str, path: str) -> None:
        if (repository := self._find(name)) is None:
            return None
        commit = repository.at(revision)
        if commit is None:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if path not in commit.files:
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.sha})
        content = commit.files[path]
        etag = f'"{object_id(path, content)}"'
        from_storage = f"http://{self.headers['Host']}" == self.hub.storage
        if is_large(path) and not from_storage:
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit.sha}
            return self._send(302, {"Location": self.hub.storage + self.path, **linked})
        return self._send(200, {"ETag": etag, **({} if from_storage else {"X-Repo-Commit": commit.sha})}, content)

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
        siblings = [{"rfilename": path} for path in commit.files]
        return self._json({"id": name, "sha": commit.sha, "private": repository.private, "siblings": siblings})

    def branch(self, name: str, branch: str) -> None:
        self._read()
        repository = self._find(name)
        if repository is None or not self._may_write():
            return None
        exists = branch in repository.branches
        repository.branches.setdefault(branch, repository.branches["main"][:1])
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
                "uploadMode": "lfs" if is_large(path) else "regular",
                "shouldIgnore": False,
                "oid": object_id(path, there[path]) if path in there else None,
            }
            for path in (file["path"] for file in wanted)
        ]
        return self._json({"files": answer})

    def large_files(self, name: str) -> None:
        objects = json.loads(self._read())["objects"]
        if not self._may_write():
            return
        actions = {"verify": {"href": f"{self.hub.endpoint}/{name}.git/info/lfs/verify"}}
        for item in objects:
            if item["oid"] not in self.hub.objects:
                item["actions"] = {"upload": {"href": f"{self.hub.storage}/objects/{item['oid']}"}, **actions}
        self._json({"transfer": "basic", "objects": objects})

    def receive(self, oid: str) -> None:
        length = int(self.headers["Content-Length"])
        if self.hub.drop(f"PUT {self.path}"):
            self.rfile.read(length // 2)
            return self._hang_up()
        content = self.rfile.read(length)
        if hashlib.sha256(content).hexdigest() != oid:
            return self._send(400, {})
        self.hub.objects[oid] = content
        return self._send(200, {})

    def verify(self, name: str) -> None:
        received = json.loads(self._read())["oid"] in self.hub.objects
        self._send(200 if received else 404, {})

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
        try:
            commit = repository.add(revision, lines, self.hub.objects)
        except KeyError as error:
            return self._json({"error": f"LFS pointer points to a file that does not exist: {error}"}, 400)
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
    ("POST", rf"{_NAME}\.git/info/lfs/objects/batch", _Handler.large_files),
    ("POST", rf"{_NAME}\.git/info/lfs/verify", _Handler.verify),
    ("PUT", "objects/(.+)", _Handler.receive),
    ("HEAD GET", rf"{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
)


@contextmanager
def serve(folders: dict[str, Path]) -> Iterator[LocalHub]:
    """Runs the hub and its storage on free ports of this machine, with a repository for each folder."""
    hub = LocalHub({name: Repository(folder) for name, folder in folders.items()})
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    # Another name for the storage: a client follows redirects to hosts of the hub, whatever their port
    hub.endpoint, hub.storage = (
        f"http://{host}:{server.server_port}" for host, server in zip(("127.0.0.1", "localhost"), servers, strict=True)
    )
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
