"""Handles SIGTERM and SIGINT of a service: the first lets it end well, the second ends it at once."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signal(stop: Callable[[], None], hurry: Callable[[], None] | None = None) -> None:
    """Has the running loop call `stop` at the first signal, and `hurry` at each later one.

    Without `hurry` the second signal ends the process, even one whose loop is stuck.
    """
    loop = asyncio.get_running_loop()

    def on_first() -> None:
        for number in STOP_SIGNALS:
            if hurry is not None:
                loop.add_signal_handler(number, hurry)
                continue
            loop.remove_signal_handler(number)
            # Python's own handler of SIGINT would only raise, and wait for the interpreter to do so.
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_first)
