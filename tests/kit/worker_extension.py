"""A worker's extension, as its users write them: `--worker-extension tests.kit.worker_extension:Example`."""

from __future__ import annotations

import json
import sys
import threading
from typing import TYPE_CHECKING

from tests.kit.panics import panic

if TYPE_CHECKING:
    from collections.abc import Generator

    from worker_service.operations.extensions import WorkerView

NAME = "example"


class Example:
    """Counts weights, answers what it was asked, and fails where it is told to."""

    name = NAME

    def __init__(self, view: WorkerView) -> None:
        self._view = view
        # Set by a test: it is waited for in an operation, and says that one has begun.
        self.may_end = threading.Event()
        self.has_begun = threading.Event()
        self.num_calls = 0
        self.operations = {
            "echo": lambda payload: payload,
            "count": self.count,
            "fail": self.fail,
            "answer_text": lambda payload: payload.decode(),
            "wait": self.wait,
            "wait_in_pieces": self.wait_in_pieces,
            "imports": self.imports,
            "write": self.write,
            "panic": self.panic,
            "leave": self.leave,
        }

    def count(self, payload: bytes) -> bytes:
        """Counts the numbers of each tensor whose name begins with the payload, as JSON."""
        sizes = {
            name: tensor.numel() for name, tensor in self._view.named_weights() if name.startswith(payload.decode())
        }
        return json.dumps({"architecture": self._view.config.architecture, "sizes": sizes}).encode()

    def imports(self, payload: bytes) -> bytes:
        """Tells as JSON whether this process has imported the packages in the payload, with commas between."""
        return json.dumps({name: name in sys.modules for name in payload.decode().split(",")}).encode()

    def write(self, payload: bytes) -> bytes:
        """Overwrites what it was shown."""
        for _, tensor in self._view.named_weights():
            tensor.zero_()
        return self._view.run_between_steps(lambda: b"in the same thread")

    def fail(self, payload: bytes) -> bytes:
        """Raises an error of its own."""
        raise ValueError("as it was told")

    def panic(self, payload: bytes) -> bytes:
        """Calls a library that panics."""
        panic()
        return b""

    def leave(self, payload: bytes) -> bytes:
        """Exits, as a library may."""
        sys.exit()

    def wait(self, payload: bytes) -> bytes:
        """Takes until it may end."""
        self.num_calls += 1
        self.has_begun.set()
        assert self.may_end.wait(20)
        return b"done"

    def wait_in_pieces(self, payload: bytes) -> Generator[None, None, bytes]:
        """Takes until it may end, and lets steps run meanwhile."""
        while not self.may_end.is_set():
            self.has_begun.set()
            yield
        return b"done"


class Again(Example):
    """Has the name of another."""


class Diagnostics(Example):
    """Has the name of the extension that every worker has."""

    name = "diagnostics"


class NoExtension:
    """Lacks what an extension has."""

    def __init__(self, view: WorkerView) -> None:
        pass


class Breaks:
    """Cannot be made."""

    def __init__(self, view: WorkerView) -> None:
        view.config  # noqa: B018 - there is no model yet
