"""Limits the time that a process takes to end, since threads in long computations or hung I/O cannot be interrupted.

Python waits for such threads: asyncio for five minutes, the interpreter for ever.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial

from blockyard.service.roots import make_thread
from blockyard.telemetry import EventLogger

log = EventLogger(__name__)

# How long to wait for the log line: a hung thread may hold the log's lock.
_LOG_SECONDS = 1.0


def end_within(seconds: float, exit_code: int = 0) -> None:
    """Ends this process after `seconds`, whatever its threads do, unless it ends by itself before."""
    make_thread(partial(_end, seconds, exit_code), "end").start()


def _end(seconds: float, exit_code: int) -> None:
    time.sleep(seconds)
    teller = threading.Thread(target=_tell, args=(seconds,), daemon=True)
    teller.start()
    teller.join(_LOG_SECONDS)
    os._exit(exit_code)


def _tell(seconds: float) -> None:
    log.warning("the process ends without threads that still work", after_seconds=seconds)
