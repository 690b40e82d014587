"""Ends coroutines of a run that is over, whatever their code does.

Python runs the `finally` blocks of a coroutine that is dropped while it waits. The tasks of a killed process may not
run them, so a simulated loop keeps such tasks until the run is over. Then the blocks do run, because Python has no
other way to free a frame, but nothing observes it: the loop is closed, and what they log or raise is ignored.
"""

from __future__ import annotations

import logging
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections import deque
    from collections.abc import Generator, Sequence

# A coroutine that awaits in `finally` has to be closed once for each such await.
_MAX_AWAITS = 100


def bury(tasks: Sequence[asyncio.Task[Any]], handles: deque[asyncio.Handle]) -> None:
    """Ends the tasks that are not done, and drops callbacks that were ready."""
    with _muted():
        for task in tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
        handles.clear()


def _close(coro: Any) -> None:
    for _ in range(_MAX_AWAITS):
        try:
            coro.close()
        except BaseException:  # noqa: BLE001 - whatever the code raises, its process is dead
            continue
        return


@contextmanager
def _muted() -> Generator[None]:
    level, hook = logging.root.manager.disable, sys.unraisablehook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        sys.unraisablehook = hook
