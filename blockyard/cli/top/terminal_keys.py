"""Reads single keys from the terminal, without an end of line, while something is shown on it."""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


class TerminalKeys:
    """The keys that are pressed; without a terminal to read from, none ever is."""

    def __init__(self, terminal: int | None) -> None:
        """`terminal`: its file descriptor."""
        self._terminal = terminal

    def wait(self, seconds: float) -> str:
        """Waits for keys, so long at most, and returns them; empty: there were none."""
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._terminal, 64).decode(errors="replace")
        if not pressed:
            # The terminal is gone, and would be found readable for ever.
            self._terminal = None
        return pressed


@contextmanager
def terminal_keys() -> Generator[TerminalKeys]:
    """Takes keys one by one, and leaves the terminal as it was."""
    try:
        import termios  # noqa: PLC0415 - not on every system
        import tty  # noqa: PLC0415
    except ImportError:
        yield TerminalKeys(None)
        return
    if not sys.stdin.isatty():
        yield TerminalKeys(None)
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield TerminalKeys(terminal)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
