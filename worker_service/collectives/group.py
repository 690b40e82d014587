"""A group of ranks for one epoch: its collectives, and the lifetime that they share, for any thread.

`GroupLifetime` knows whether the group is whole, and the deadline of its work. It owns the process groups. Dropping the
last reference to a gloo group closes its connections, and that frees the peers that wait in a collective (measured: in
6 to 30 ms; gloo's `abort` and `shutdown` do not free them). The reference cannot be dropped while an operation of this
rank runs. Then the device thread drops it, when the operation has ended because a peer closed its connections or
because of its timeout.
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
from blockyard_kernels.collectives import Collectives, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from blockyard.contract.parallel import Parallel

log = EventLogger(__name__)

# The least time that an operation gets, even if it begins just before the deadline.
MIN_SECONDS = 0.001
# The most unfinished sends: a stage continues with its next steps while the following stage is busy.
MAX_QUEUED_SENDS = 4


class GroupLifetime:
    """The process groups of one rank, until one of them breaks or `abort` ends them."""

    def __init__(self, rank: int, abort_groups: Callable[[list[Any]], None] | None = None) -> None:
        """`abort_groups`: aborts process groups in which an operation runs, if the transport can; from any thread."""
        self._rank = rank
        self._abort_groups = abort_groups
        # Reentrant: the garbage collector may run finalizers that abort in a thread that holds the lock.
        self._lock = threading.RLock()
        self._groups: list[Any] = []
        # Unfinished sends with their rows, which must stay alive. A send also keeps the group's connections open.
        self._sends: deque[tuple[Any, Any]] = deque()
        self.is_in_operation = False
        self._is_suspended = False
        self._deadline = math.inf
        self.problem = ""
        self.waited_seconds = 0.0
        """Seconds that the running work has waited for the previous stage."""

    def own(self, group: Any) -> int:
        """Takes ownership of a process group, and returns its index. The caller must keep no reference to it."""
        with self._lock:
            self._groups.append(group)
            place = len(self._groups) - 1
            is_late = bool(self.problem)
        if is_late:
            self._release()
        return place

    @property
    def seconds_left(self) -> float:
        """Seconds left for the running work; infinity without work or without a deadline."""
        return self._deadline - time.monotonic()

    @contextmanager
    def work(self, seconds: float) -> Generator[None]:
        """Allows operations for `seconds` in total. Raises BlockyardError GROUP_BROKEN if no work may begin."""
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
        """Whether no work runs and no rows are in flight, which another epoch would mistake for its own rows.

        gloo only reports a send as completed if it was waited for.
        """
        with self._lock:
            return math.isinf(self._deadline) and all(send.is_completed() for send, _ in self._sends)

    def suspend(self) -> bool:
        """Prevents further work, and returns whether the group is idle: then another epoch may use it."""
        with self._lock:
            self._is_suspended = True
            return self.is_idle

    def resume(self) -> None:
        """Allows work again after `suspend`."""
        self._is_suspended = False

    def run(self, place: int, operation: Callable[[Any], object]) -> None:
        """Runs an operation of a process group, which breaks the group if it fails.

        Raises BlockyardError GROUP_BROKEN if the group is broken before or after the operation.
        """
        with self._lock:
            self.require_whole()
            self.is_in_operation = True
        failure = ""
        try:
            faults.reach(faults.IN_COLLECTIVE)
            operation(self._groups[place])
        except RuntimeError as error:
            # The error must not be kept: its frames hold a reference to the process group.
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
        """Adds a send that has begun. If too many are unfinished, returns the oldest, for which to wait."""
        self._sends.append((work, rows))
        return self._sends.popleft()[0] if len(self._sends) > MAX_QUEUED_SENDS else None

    def require_whole(self) -> None:
        """Raises BlockyardError GROUP_BROKEN if the group is broken."""
        if self.problem:
            raise BlockyardError(Reason.GROUP_BROKEN, self.problem, metadata={"rank": str(self._rank)})

    def abort(self, reason: str) -> None:
        """Ends the group. May be called from any thread, and more than once."""
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
    """Returns the message of an error without C++'s source location and stack, and without gloo's advice."""
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
