"""What goes wrong at the named points of the product, see `blockyard.service.faults`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults

if TYPE_CHECKING:
    from collections.abc import Generator

    from tests.kit.simulation.cluster import Cluster

# The kind of fault.
AT_POINTS = "at points"
# How long a process hangs.
HANG_SECONDS = (0.05, 8.0)


class Points:
    """Lets something go wrong at each point with a small chance, 0 at first."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = cluster.loop.random_for("points")
        self.chance = 0.0

    def reach(self, point: str) -> None:
        """Does at a point what the draw says, in the process that is there. Raises BlockyardError."""
        if not self.chance or self._random.random() >= self.chance:
            return
        loop, owner = self._cluster.loop, self._cluster.loop.current_owner()
        action = self._random.choice(list(faults.Action))
        self._cluster.note_strike(AT_POINTS, "any")
        loop.note(f"{action} at {point} in {owner.name}")
        match action:
            case faults.Action.ERROR:
                raise BlockyardError(Reason.BUG, f"a fault on purpose: {point}")
            case faults.Action.HANG:
                loop.freeze(owner)
                loop.call_later(
                    self._random.uniform(*HANG_SECONDS), loop.thaw, owner, context=loop.context_of(loop.main)
                )
            case _:
                self._cluster.nodes[owner.name].kill()

    @contextmanager
    def reached(self) -> Generator[None]:
        """Has the product's points reach this."""
        reach, faults.reach = faults.reach, self.reach
        try:
            yield
        finally:
            faults.reach = reach
