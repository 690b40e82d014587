"""Work on a device that comes to its results later: launched in order, then awaited. Knows no ops.

A host that waits for each step before it prepares the next one leaves its device idle in between. Where a backend's
launcher has a depth above 1, a step is launched while the one before it runs, and what the host does not know yet, the
tokens of that step, stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Results = tuple[Tensor, ...]


class Launched(Protocol):
    """Work that was launched."""

    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> Results:
        """Waits until the work is done, and returns its results on the host; raises what it raised.

        From any thread, and more than once.
        """
        ...


class Launcher(Protocol):
    """Launches the work of one device, from one thread."""

    @property
    def depth(self) -> int:
        """How many launched steps may be unfinished; 1: work is done when it is launched."""
        ...

    def launch(self, work: Callable[[], Results]) -> Launched:
        """Launches work behind all that was launched before.

        Args:
            work: runs at any time before `wait` returns, behind the works before it, and returns tensors on the device.
                Arrays of the host that it reads stay as they are until then.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    results: Results
    is_ready = True

    def wait(self) -> Results:
        return self.results


class Immediate:
    """Of a device that computes in the thread that asks it to."""

    depth = 1

    def launch(self, work: Callable[[], Results]) -> Launched:
        """Does the work."""
        return _Done(work())


IMMEDIATE = Immediate()
