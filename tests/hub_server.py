"""A Hugging Face Hub on this machine: enough of its download protocol for the real client, weights by redirect.

Folders are repositories. Files that end in .safetensors are handed out as the Hub hands out large files: the hub
answers with a redirect, the linked size and the linked etag, and another origin (a second port) has the bytes.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from tests.hub_cache import COMMIT


@dataclass
class LocalHub:
    """What the server hands out and what it was asked for.

    Attributes:
        repositories: 'owner/name' -> folder.
        endpoint: For the client's HF_ENDPOINT.
        requests: 'METHOD path' of each request to either origin, in order.
    """

    repositories: dict[str, Path]
    endpoint: str = ""
    storage: str = ""
    requests: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Nothing on the tests' output."""

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        owner, name, *rest = unquote(self.path).strip("/").split("/")
        folder = self.hub.repositories.get(f"{owner}/{name}")
        file = folder and rest[0] == "resolve" and folder / "/".join(rest[2:])
        if not folder:
            self._send(401, {"X-Error-Code": "RepoNotFound"})
        elif not file or not file.is_file():
            self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            self._send_file(file)

    def _send_file(self, file: Path) -> None:
        content = file.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        from_storage = f"http://{self.headers['Host']}" == self.hub.storage
        if file.suffix == ".safetensors" and not from_storage:
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
            self._send(302, {"Location": self.hub.storage + self.path, "X-Repo-Commit": COMMIT, **linked})
        else:
            commit = {} if from_storage else {"X-Repo-Commit": COMMIT}
            self._send(200, {"ETag": f'"{etag}"', **commit}, content)

    def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@contextmanager
def serve(repositories: dict[str, Path]) -> Iterator[LocalHub]:
    """Runs the hub and its storage on free ports of this machine."""
    hub = LocalHub(repositories)
    handler = type("Handler", (_Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
