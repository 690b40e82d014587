"""Bars of a system's start on a terminal: the download, the load, the warm-up. Draws nothing elsewhere."""

from __future__ import annotations

import functools
import os
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from blockyard.cli.top.readings import find_start
from blockyard.cli.units import size
from blockyard.local.local_system import download_model

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from blockyard.admin.v1 import admin_pb2
    from blockyard.configuration import SystemConfiguration

T = TypeVar("T")
# Exit code of a program that Ctrl-C ended.
INTERRUPTED = 130


class StartBars:
    """A bar with the current phase of a start, on standard error; it disappears at the end.

    `is_shown`: whether this is a terminal. `is_open`: inside its `with` block.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[sizes]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
        self.is_shown = self.console.is_terminal
        self.is_open = False
        self._task = self._progress.add_task("starting", total=None, sizes="")

    def __enter__(self) -> Self:
        self.is_open = True
        if self.is_shown:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar before its block does; may be called twice."""
        if self.is_open and self.is_shown:
            self._progress.stop()
        self.is_open = False

    def show(self, phase: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Shows a phase; without a total its bar only moves."""
        sizes = f"{size(done_bytes)} of {size(total_bytes)}" if total_bytes else ""
        self._progress.update(
            self._task, description=phase, completed=done_bytes, total=total_bytes or None, sizes=sizes
        )

    def show_download(self, model: str) -> Callable[[int, int], None] | None:
        """Returns a function that shows a download's bytes; None if no bar is shown."""
        if not self.is_shown:
            return None
        return lambda done_bytes, total_bytes: self.show(f"downloading {model}", done_bytes, total_bytes)

    def show_status(self, status: admin_pb2.GetStatusResponse | None) -> None:
        """Shows the phase of a starting system by its status; None: it does not answer yet."""
        if status is not None:
            phase, done_bytes, total_bytes = find_start(status) or ("starting", 0, 0)
            self.show(phase, done_bytes, total_bytes)

    def write_line(self, line: str) -> None:
        """Writes a line: above the bar on a terminal, plainly elsewhere."""
        if self.is_shown:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def download(configurations: Sequence[SystemConfiguration], bars: StartBars) -> None:
    """Downloads a hub's models for a system. Ctrl-C ends this process; the next download goes on where it was."""
    for configuration in configurations:
        with ending_downloads():
            run_in_thread(
                functools.partial(download_model, configuration, bars.show_download(configuration.model.model))
            )


@contextmanager
def ending_downloads() -> Generator[None]:
    """Ends this process at once on Ctrl-C, since the threads of the hub's library end only with their files."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).show_cursor()
        os._exit(INTERRUPTED)


def run_in_thread(work: Callable[[], T]) -> T:
    """Runs work in a thread, which an interrupt does not wait for, and returns its result or raises its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()
