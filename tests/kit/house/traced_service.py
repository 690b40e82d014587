"""Runs a service and notes the files that it executes: `python -m tests.kit.house.traced_service MODULE [FLAG ...]`.

SIGUSR1 forgets what was noted. SIGUSR2 writes a JSON object to the file named by BLOCKYARD_TEST_TRACE: each file of
which a function was called, and when its first call was, in nanoseconds of CLOCK_MONOTONIC. Module bodies do not count.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

VARIABLE = "BLOCKYARD_TEST_TRACE"
ROOT = Path(__file__).parents[3]


class Trace:
    """The time of the first call into each file."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._first_calls: dict[str, int] = {}

    def start(self) -> None:
        """Watches all threads from now on."""
        signal.signal(signal.SIGUSR1, lambda *_: self._clear())
        signal.signal(signal.SIGUSR2, lambda *_: self._write())
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename not in self._first_calls:
            self._first_calls[code.co_filename] = time.monotonic_ns()

    def _clear(self) -> None:
        self._first_calls.clear()
        self._replace("{}")

    def _write(self) -> None:
        # A copy, since other threads go on to add files.
        seen = self._first_calls.copy()
        calls = {name: when for name, when in seen.items() if name.startswith(f"{ROOT}/")}
        self._replace(json.dumps({os.path.relpath(name, ROOT): when for name, when in calls.items()}))

    def _replace(self, text: str) -> None:
        """Writes the file in one piece, for a reader who waits for it."""
        unfinished = self._output.with_suffix(".new")
        unfinished.write_text(text)
        unfinished.replace(self._output)


def main() -> None:
    """The program."""
    module, *flags = sys.argv[1:]
    sys.argv = [module, *flags]
    Trace(Path(os.environ[VARIABLE])).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
