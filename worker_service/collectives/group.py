"""A group of ranks for one epoch: its collectives, and the lifetime that they share, for any thread.

`GroupLifetime` knows whether the group is whole, and how long its work may take. It owns the process groups. Dropping
the last reference to one of gloo's closes its connections, which is what frees the peers that wait in a collective
(measured: in 6 to 30 ms; `abort` and `shutdown` of gloo free nobody). That cannot be done while an operation of this
rank runs: then the device thread does it, when the operation has ended by its peer's closed connections or its timeout.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.telemetry import EventLogger
from kernels.collectives import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from blockyard.contract.parallel import Parallel
    from kernels.collectives import Collectives

log = EventLogger(__name__)

# The least time that an operation gets, even if it begins at the last moment.
MIN_SECONDS = 0.001
# Sends that may be on their way together: a stage runs on to its next steps while the one behind it is busy.
MAX_QUEUED_SENDS = 4


class GroupLifetime:
    """The process groups of one rank, until one of them breaks or `abort` ends them."""

    def __init__(self, rank: int, abort_groups: Callable[[list[Any]], None] | None = None) -> None:
        """`abort_groups`: what can be done to process groups in which an operation runs; called in any thread."""
        self._rank = rank
        self._abort_groups = abort_groups
        # A thread that aborts may hold it already: where the collector runs finalizers.
        self._lock = threading.RLock()
        self._groups: list[Any] = []
        # Each send with its rows, which stay until then; it holds the group's connections too.
        self._sends: deque[tuple[Any, Any]] = deque()
        self.is_in_operation = False
        self._is_suspended = False
        self._deadline = math.inf
        self.problem = ""
        self.waited_seconds = 0.0
        """Seconds that the running work has waited for the previous stage."""

    def own(self, group: Any) -> int:
        """Takes a process group over, of which the caller keeps no reference, and returns its place."""
        with self._lock:
            self._groups.append(group)
            place = len(self._groups) - 1
            is_late = bool(self.problem)
        if is_late:
            self._release()
        return place

    @property
    def seconds_left(self) -> float:
        """Seconds left to the running work; infinity without work or without a deadline."""
        return self._deadline - time.monotonic()

    @contextmanager
    def work(self, seconds: float) -> Generator[None]:
        """Allows operations, for so long together. Raises BlockyardError GROUP_BROKEN where no work may begin."""
        with self._lock:
            self.require_whole()
            if self._is_suspended:
                raise BlockyardError(Reason.GROUP_BROKEN, "the epoch of the group is over")
            self._deadline = time.monotonic() + seconds
            self.waited_seconds = 0.0
        try:
            yield
        finally:
            self._deadline = math.inf

    @property
    def is_idle(self) -> bool:
        """Whether no work runs and no rows are on their way, which another epoch would take for its own.

        Of gloo's sends it is known only where they were waited for.
        """
        with self._lock:
            return math.isinf(self._deadline) and all(send.is_completed() for send, _ in self._sends)

    def suspend(self) -> bool:
        """Lets no work begin any more, and returns whether the group is idle: then it is of use in another epoch."""
        with self._lock:
            self._is_suspended = True
            return self.is_idle

    def resume(self) -> None:
        """Lets work begin again."""
        self._is_suspended = False

    def run(self, place: int, operation: Callable[[Any], object]) -> None:
        """Runs an operation of a process group, which breaks the group if it fails.

        Raises BlockyardError GROUP_BROKEN where the group is of no use, before or after.
        """
        with self._lock:
            self.require_whole()
            self.is_in_operation = True
        failure = ""
        try:
            faults.reach(faults.IN_COLLECTIVE)
            operation(self._groups[place])
        except RuntimeError as error:
            # Nothing of it may stay: it holds frames, and they hold the process group.
            failure = first_line(error)
        finally:
            with self._lock:
                self.is_in_operation = False
        if failure:
            log.warning("an operation of the group failed", rank=self._rank, reason=failure)
            self.abort(f"rank {self._rank} lost its group: {failure}")
        if self.problem:
            self._release()
            self.require_whole()

    def queue(self, work: Any, rows: Any) -> Any | None:
        """Takes a send that has begun, in an operation, and returns the one to wait for where there are many."""
        self._sends.append((work, rows))
        return self._sends.popleft()[0] if len(self._sends) > MAX_QUEUED_SENDS else None

    def require_whole(self) -> None:
        """Raises BlockyardError GROUP_BROKEN once the group is of no use."""
        if self.problem:
            raise BlockyardError(Reason.GROUP_BROKEN, self.problem, metadata={"rank": str(self._rank)})

    def abort(self, reason: str) -> None:
        """Ends the group. From any thread; idempotent."""
        with self._lock:
            if self.problem:
                return
            self.problem = reason
            groups = list(self._groups)
        log.info("the group ends", rank=self._rank, reason=reason)
        if self._abort_groups is not None:
            self._abort_groups(groups)
        groups.clear()
        self._release()

    def _release(self) -> None:
        """Drops the process groups, unless an operation runs in one."""
        with self._lock:
            if self.is_in_operation:
                return
            groups, self._groups = self._groups, []
            sends, self._sends = self._sends, deque()
        # Outside of the lock, since it takes milliseconds.
        sends.clear()
        groups.clear()


def first_line(error: Exception) -> str:
    """Returns what an error says, without the place and the stack that C++ adds to it, and without gloo's advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". This is typically")[0]


@dataclass(frozen=True, slots=True)
class RankGroup(Ranks):
    """The ranks of a replica. With a single stage, `world` and `stage` are the same collectives."""

    lifetime: GroupLifetime
    fingerprint: bytes = b""
    """The network's fingerprint, if a rank knew it before; see `DecoderModel.fingerprint`."""


def connect_group(
    connect: Callable[[str, int, int], Collectives], parallel: Parallel, lifetime: GroupLifetime
) -> RankGroup:
    """Makes a group. `connect` makes the collectives from a unique name, this rank's place, and the size."""
    world = connect("world", parallel.rank, parallel.world_size)
    if parallel.pipeline_parallel_size == 1:
        return RankGroup(world, world, lifetime)
    name = f"stage {parallel.pipeline_rank}"
    return RankGroup(world, connect(name, parallel.tensor_rank, parallel.tensor_parallel_size), lifetime)
