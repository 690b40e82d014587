"""A small model hub on localhost: serves folders over the routes that `huggingface_hub` asks for.

`HF_ENDPOINT=hub.url` sends a process to it. It notes every file that was fetched, in order.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

BRANCH = "main"


class FakeHub:
    """What the hub holds, and what it was asked for."""

    def __init__(self, repositories: Mapping[str, Path], gated: frozenset[str]) -> None:
        self.repositories = repositories
        self.gated = gated
        self.fetched: list[str] = []
        self.resets: set[str] = set()
        """Files whose downloads end with a reset of the connection."""
        self.url = ""

    def commit(self, name: str) -> str:
        """The one commit of a repository."""
        return hashlib.sha1(name.encode()).hexdigest()


@contextmanager
def fake_hub(repositories: Mapping[str, Path], *, gated: frozenset[str] = frozenset()) -> Iterator[FakeHub]:
    """Serves repositories (`owner/name` -> folder) until the block ends."""
    hub = FakeHub(repositories, gated)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", "models", owner, name, "revision", revision]:
                self._repository(f"{owner}/{name}", revision, self._info)
            case ["api", "models", owner, name, "tree", revision, *_]:
                self._repository(f"{owner}/{name}", revision, self._tree)
            case [owner, name, "resolve", revision, *path] if path:
                self._repository(f"{owner}/{name}", revision, lambda repository: self._file(repository, "/".join(path)))
            case _:
                self._fail(404, "EntryNotFound")

    def _repository(self, name: str, revision: str, answer: Any) -> None:
        if name not in self.hub.repositories:
            self._fail(404, "RepoNotFound")
        elif name in self.hub.gated:
            self._fail(403, "GatedRepo")
        elif revision not in (BRANCH, self.hub.commit(name)):
            self._fail(404, "RevisionNotFound")
        else:
            answer(name)

    def _info(self, name: str) -> None:
        siblings = [{"rfilename": path} for path in self._paths(name)]
        self._json({"id": name, "sha": self.hub.commit(name), "siblings": siblings})

    def _tree(self, name: str) -> None:
        folder = self.hub.repositories[name]
        self._json(
            [
                {"type": "file", "path": path, "size": (folder / path).stat().st_size, "oid": _etag(folder / path)}
                for path in self._paths(name)
            ]
        )

    def _paths(self, name: str) -> list[str]:
        folder = self.hub.repositories[name]
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def _file(self, name: str, path: str) -> None:
        file = self.hub.repositories[name] / path
        if not file.is_file():
            self._fail(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.hub.fetched.append(path)
            if path in self.hub.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                return
        self._send(200, file.read_bytes(), {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": self.hub.commit(name)})

    def _json(self, body: Any) -> None:
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
