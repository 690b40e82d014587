"""A program on a terminal of its own: what it shows, and what a user types."""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import termios
import time
from fcntl import ioctl
from typing import TYPE_CHECKING, Self

from tests.kit.processes.nursery import ROOT, Child

if TYPE_CHECKING:
    from collections.abc import Mapping

_SIZE = (24, 80)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]")


class Terminal:
    """`blockyard` with these arguments on a pseudo-terminal of 80 columns; its standard error is there too.

    `shown` is what it has shown so far, without colours and cursor movements.
    """

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._controller, terminal = pty.openpty()
        ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *_SIZE, 0, 0))
        told = {**os.environ, "TERM": "xterm", **(environment or {})}
        self.process = Child("blockyard", arguments, told, terminal, typed=terminal, folder=ROOT)
        os.close(terminal)
        self.shown = ""
        self._seen = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._controller)

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def interrupt(self) -> None:
        """Types Ctrl-C."""
        self.type("\x03")

    def wait_for(self, pattern: str, seconds: float = 90.0) -> str:
        """Reads until what was shown since the last call matches; returns it, up to the match's end."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown[self._seen :])) is None:
            assert time.monotonic() < deadline, f"{pattern} does not come: {self.shown}"
            assert self._read(deadline), f"it ended without {pattern}: {self.shown}"
        text = self.shown[self._seen : self._seen + match.end()]
        self._seen += match.end()
        return text

    def wait(self, seconds: float = 90.0) -> int:
        """Reads to the end, and returns the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            assert time.monotonic() < deadline, f"it does not end: {self.shown}"
        return self.process.wait(seconds)

    def _read(self, deadline: float) -> bool:
        """Reads what is shown next; False: there will be no more."""
        if not select.select([self._controller], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return True
        try:
            data = os.read(self._controller, 65536)
        except OSError:
            # Linux ends a terminal without programs with EIO.
            return False
        self.shown += _CONTROL.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
        return bool(data)
