"""Reads single keys from the terminal, without waiting for an end of line."""

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
    """Reads the pressed keys; without a terminal there never are any."""

    def __init__(self, terminal: int | None) -> None:
        """`terminal`: the terminal's file descriptor; None: there is no terminal."""
        self._terminal = terminal

    def wait(self, seconds: float) -> str:
        """Waits up to `seconds` for keys and returns them; empty: none was pressed."""
        if self._terminal is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._terminal], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._terminal, 64).decode(errors="replace")
        if not pressed:
            # The terminal is gone: select would report it readable for ever.
            self._terminal = None
        return pressed


@contextmanager
def terminal_keys() -> Generator[TerminalKeys]:
    """Switches the terminal to single keys, and restores it afterwards."""
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
