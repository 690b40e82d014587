"""A device that comes to its results as late as it may: each work runs when the thread that launched it waits for it,
with what its arrays hold by then; or when another thread does, and nothing was launched behind it for a while.

It stands for a GPU. What the host needs too early, or changes too early, shows as other tokens.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.launching import Results
    from blockyard_kernels.ops import Backend

# As long as a step of a GPU may take.
STEP_SECONDS = 0.01


class LateWork:
    """Work that was launched."""

    def __init__(self, launcher: LateLauncher, work: Callable[[], Results]) -> None:
        self._launcher = launcher
        self._work = work
        self._results: Results | None = None
        self._error: Exception | None = None
        self._thread = threading.get_ident()
        self.has_successor = threading.Event()

    @property
    def is_ready(self) -> bool:
        """See `blockyard_kernels.launching.Launched`."""
        return self._results is not None or self._error is not None

    def wait(self) -> Results:
        """Runs what was launched before, and this."""
        if threading.get_ident() != self._thread:
            self.has_successor.wait(STEP_SECONDS)
        self._launcher.run_until(self)
        if self._error is not None:
            raise self._error
        assert self._results is not None
        return self._results

    def run(self) -> None:
        """Does the work."""
        try:
            self._results = self._work()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error


class LateLauncher:
    """See `blockyard_kernels.launching.Launcher`."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.most = 0
        """The most works that were unfinished together."""
        self._works: deque[LateWork] = deque()
        self._lock = threading.Lock()

    def launch(self, work: Callable[[], Results]) -> LateWork:
        """Keeps work for later."""
        launched = LateWork(self, work)
        with self._lock:
            if self._works:
                self._works[-1].has_successor.set()
            self._works.append(launched)
            self.most = max(self.most, len(self._works))
        return launched

    def run_until(self, last: LateWork) -> None:
        """Runs works in their order, `last` being the last of them."""
        with self._lock:
            while not last.is_ready:
                self._works.popleft().run()


def make_late(backend: Backend, depth: int) -> LateLauncher:
    """Makes a backend late that nobody else has."""
    launcher = LateLauncher(depth)
    backend.launcher = launcher  # type: ignore[misc]
    return launcher
