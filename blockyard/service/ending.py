"""Bounds the end of a process: a thread that reads a file system which hangs, or computes, cannot be interrupted.

Python's own end waits for such threads: asyncio's for five minutes, the interpreter for ever.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial

from blockyard.service.roots import make_thread
from blockyard.telemetry import EventLogger

log = EventLogger(__name__)

# Where even the log's lock is held by what hangs.
_LOG_SECONDS = 1.0


def end_within(seconds: float, exit_code: int = 0) -> None:
    """Ends this process after so long, whatever its threads do; without effect where it has ended by itself."""
    make_thread(partial(_end, seconds, exit_code), "end").start()


def _end(seconds: float, exit_code: int) -> None:
    time.sleep(seconds)
    teller = threading.Thread(target=_tell, args=(seconds,), daemon=True)
    teller.start()
    teller.join(_LOG_SECONDS)
    os._exit(exit_code)


def _tell(seconds: float) -> None:
    log.warning("the process ends without threads that still work", after_seconds=seconds)
