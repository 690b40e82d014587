"""This worker's membership of its replica's group: it joins a group for an epoch, keeps it, and leaves it.

A process has one group at a time, and never two groups that could both still write: if the device thread does not
return from an operation of the old group, the process ends. This object lives in the event loop, which can end an
operation in which the device thread waits. The device thread joins groups and works in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from blockyard.clock import SYSTEM, Clock
from blockyard.contract.workers import GroupInfo, GroupRequest
from blockyard.errors import BlockyardError, Reason, Violation
from blockyard.service.roots import end_process, start_task
from blockyard.telemetry import EventLogger
from worker_service.collectives.group import GroupLifetime, RankGroup, first_line
from worker_service.collectives.nccl import abort_nccl
from worker_service.groups.joining import DEFAULT_SETTINGS, GroupSettings, Route, find_route, greet, join
from worker_service.groups.rendezvous import SECRET_BYTES, Rendezvous, RendezvousPoint, RendezvousStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from blockyard.contract.parallel import Parallel
    from worker_service.device.thread import DeviceThread

log = EventLogger(__name__)

MAX_FORM_SECONDS = 3600.0
# Extra time for the device thread to return from an operation, after the operation's own time limit.
RETURN_SECONDS = 5.0
EXIT_CODE = 70
MAX_INCARNATION_BYTES = 256


class GroupLink(RendezvousPoint, Protocol):
    """A connection to the meeting point at rank 0."""

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Member:
    """A group that this worker is in or joins. While it joins, `group` is None; `store` exists while the ranks meet."""

    request: GroupRequest
    lifetime: GroupLifetime
    kind: str = ""
    store: RendezvousStore | None = None
    group: RankGroup | None = None


def _nowhere(request: GroupRequest) -> GroupLink:
    raise BlockyardError(Reason.FEATURE_DISABLED, "this worker has no connection to other workers")


class Membership:
    def __init__(
        self,
        thread: DeviceThread,
        incarnation: str,
        settings: GroupSettings = DEFAULT_SETTINGS,
        connect: Callable[[GroupRequest], GroupLink] = _nowhere,
        end_process: Callable[[int], None] = end_process,
        clock: Clock = SYSTEM,
    ) -> None:
        """`connect`: connects other ranks to rank 0. `end_process`: called with the exit code."""
        self.epoch = 0
        # The fingerprint of this worker's network, for ranks that come later; empty: not known yet.
        self.fingerprint = b""
        self._thread = thread
        self._incarnation = incarnation
        self._clock = clock
        self._settings = settings
        self._connect = connect
        self._end_process = end_process
        self._rendezvous: Rendezvous | None = None
        self._member: _Member | None = None
        self.watches: set[asyncio.Task[None]] = set()

    @property
    def info(self) -> GroupInfo | None:
        """The current group; None before the first one."""
        member = self._member
        if member is None:
            return None
        problem = member.lifetime.problem
        reusable = member.group is not None and not problem and member.lifetime.is_idle
        return GroupInfo(member.request.epoch, reusable, problem, _digest(member.request.members))

    def find(self, epoch: int | None = None) -> RankGroup | None:
        """Returns the group of an epoch, or the last group (None), whether whole or broken. For any thread."""
        member = self._member
        return member.group if member is not None and epoch in (None, member.request.epoch) else None

    def require_place(self, parallel: Parallel, members: tuple[str, ...]) -> None:
        """Refuses a group with another process in this worker's place: raises WRONG_STATE."""
        if (expected := members[parallel.rank]) != self._incarnation:
            message = f"rank {parallel.rank} is {self._incarnation} now, not {expected}: it was restarted"
            raise BlockyardError(Reason.WRONG_STATE, message)

    def open_rendezvous(self, parallel: Parallel, epoch: int) -> bytes:
        """Opens the meeting point for a checked epoch, and returns its secret."""
        if parallel.rank != 0:
            raise BlockyardError(Reason.WRONG_STATE, f"the ranks meet at rank 0, and this is rank {parallel.rank}")
        self.epoch = max(self.epoch, epoch)
        self._close_rendezvous(f"the meeting point of epoch {epoch} was opened in its place")
        self._rendezvous = Rendezvous(epoch, self._clock)
        return self._rendezvous.secret

    def meeting_point(self, epoch: int, secret: bytes) -> Rendezvous:
        """Returns the meeting point of an epoch; raises PERMISSION_DENIED for a wrong secret."""
        if self._rendezvous is None or not self._rendezvous.admits(epoch, secret):
            raise BlockyardError(Reason.PERMISSION_DENIED, f"no group of epoch {epoch} meets here with this secret")
        return self._rendezvous

    async def form(self, parallel: Parallel, device: torch.device, request: GroupRequest) -> str:
        """Joins a checked group, and returns its transport. After a BlockyardError the worker has no group."""
        self.epoch = max(self.epoch, request.epoch)
        before = self._member
        if request.reuse:
            member = self._take_over(request)
        else:
            member = _Member(request, GroupLifetime(parallel.rank, abort_nccl if device.type == "cuda" else None))
        # From here on every call that ends the group also ends this one, although it is still being joined.
        self._member = member
        try:
            if before is not None and before is not member:
                await self._end(before, f"epoch {request.epoch} forms another group")
            group = member.group = await self._connect_member(member, parallel, device)
        except BaseException as error:
            # A caller that has left, too. Nobody waits for this end.
            self._end(member, str(error) or "the call that formed the group was cancelled")
            raise
        finally:
            member.store = None
        log.info("group formed", epoch=request.epoch, kind=member.kind, rank=group.world.rank)
        return member.kind

    def _take_over(self, request: GroupRequest) -> _Member:
        """Keeps the present group for another epoch."""
        member, info = self._member, self.info
        if member is None or info is None or not info.reusable or _digest(request.members) != info.members_digest:
            raise BlockyardError(Reason.WRONG_STATE, "no complete and idle group of these members can be taken over")
        member.request = replace(request, secret=member.request.secret)
        return member

    async def _connect_member(self, member: _Member, parallel: Parallel, device: torch.device) -> RankGroup:
        """Meets the other ranks, unless they are connected already, and greets them."""
        request, group = member.request, member.group
        if group is not None:
            return await self._run(member, lambda: group, parallel, device)
        # This may look up a host name.
        route = await asyncio.to_thread(find_route, self._settings, device, request.rendezvous_address)
        member.kind = route.kind
        if parallel.rank != 0:
            link = self._connect(request)
            try:
                return await self._join(member, link, route, parallel, device)
            finally:
                await link.close()
        point, reason = self.meeting_point(request.epoch, request.secret), "the group was formed, or given up"
        try:
            return await self._join(member, point, route, parallel, device)
        except BlockyardError as error:
            # Callers that still wait here get the reason.
            reason = error.message
            raise
        finally:
            point.close(reason)

    async def _join(
        self, member: _Member, point: RendezvousPoint, route: Route, parallel: Parallel, device: torch.device
    ) -> RankGroup:
        store = member.store = RendezvousStore(point, asyncio.get_running_loop(), member.request.timeout_seconds)
        return await self._run(member, lambda: join(store, parallel, route, device, member.lifetime), parallel, device)

    async def _run(
        self, member: _Member, connect: Callable[[], RankGroup], parallel: Parallel, device: torch.device
    ) -> RankGroup:
        """Connects to the other ranks and greets them, in the device thread."""
        return await self._thread.run(lambda: _join_in_thread(member, connect, parallel, device, self.fingerprint))

    async def leave(self, epoch: int, reason: str) -> None:
        """Ends the group of this epoch or of an earlier one."""
        if self._rendezvous is not None and self._rendezvous.epoch <= epoch:
            self._close_rendezvous(reason)
        if self._member is not None and self._member.request.epoch <= epoch:
            await self._end(self._member, reason)

    def suspend(self) -> None:
        """Prevents further steps in the present group, whose epoch is over."""
        if self._member is not None:
            self._member.lifetime.suspend()

    def on_epoch(self, epoch: int) -> None:
        """Ends the group of an earlier epoch when the steps of `epoch` begin."""
        if self._member is not None and self._member.request.epoch < epoch:
            self._end(self._member, f"epoch {epoch} has begun")

    def on_stream_end(self, epoch: int) -> None:
        """Called when an epoch's stream ends: keeps an idle group, and ends a busy one, since its peers wait."""
        member = self._member
        if member is not None and member.request.epoch == epoch and not member.lifetime.suspend():
            self._end(member, "the step stream ended in the middle of a step, or with rows on their way")

    def _end(self, member: _Member, reason: str) -> asyncio.Future[None]:
        """Ends a group in another thread, since that may take long with NCCL.

        The returned future is done when the connections are closed, or when that is left to the device thread.
        """
        if member.store is not None:
            member.store.close(reason)
        seconds_left = member.lifetime.seconds_left
        if not math.isinf(seconds_left):
            seconds = max(0.0, seconds_left) + RETURN_SECONDS
            watch = start_task(self._require_return(seconds), "group watch")
            self.watches.add(watch)
            watch.add_done_callback(self.watches.discard)
        return asyncio.get_running_loop().run_in_executor(None, member.lifetime.abort, reason)

    async def _require_return(self, seconds: float) -> None:
        """Ends the process if the device thread stays in an operation, which could still write to the next group."""
        try:
            await asyncio.wait_for(self._thread.run(lambda: None), seconds)
        except TimeoutError:
            log.error("an operation of an ended group does not return: the process ends", exit_code=EXIT_CODE)
            self._end_process(EXIT_CODE)

    def _close_rendezvous(self, reason: str) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close(reason)


def _join_in_thread(
    member: _Member,
    connect: Callable[[], RankGroup],
    parallel: Parallel,
    device: torch.device,
    fingerprint: bytes,
) -> RankGroup:
    """Connects and greets; raises BlockyardError, and then the group has ended."""
    lifetime, failure = member.lifetime, None
    # A step of the previous epoch that was queued in this thread has run by now, and found the group suspended.
    lifetime.resume()
    with lifetime.work(member.request.timeout_seconds):
        try:
            group = connect()
            return replace(group, fingerprint=greet(group, parallel, device, member.request, fingerprint))
        except BlockyardError as error:
            failure = error
        except (RuntimeError, TimeoutError) as error:
            message = f"rank {parallel.rank} formed no group: {first_line(error)}"
            failure = BlockyardError(Reason.GROUP_BROKEN, message, metadata={"rank": str(parallel.rank)})
    lifetime.abort(failure.message)
    raise failure


def _digest(members: tuple[str, ...]) -> bytes:
    return hashlib.sha256("".join(f"{member}\n" for member in members).encode()).digest()


def wrong_members(epoch: int, members: tuple[str, ...], parallel: Parallel) -> Iterable[Violation]:
    """Yields the faults of a group's members; raises BlockyardError WRONG_STATE without a group."""
    world_size = parallel.world_size
    if world_size == 1:
        raise BlockyardError(Reason.WRONG_STATE, "this worker was set up for a world size of 1, which has no group")
    if epoch == 0:
        yield Violation("epoch", "must be at least 1")
    if len(members) != world_size or len(set(members)) != world_size:
        yield Violation("members", f"must be {world_size} different incarnations")
    elif not all(0 < len(member.encode()) <= MAX_INCARNATION_BYTES for member in members):
        yield Violation("members", f"must have from 1 to {MAX_INCARNATION_BYTES} bytes each")


def wrong_request(request: GroupRequest) -> Iterable[Violation]:
    """Yields the faults of a request to join a group."""
    if not 0 < request.timeout_seconds <= MAX_FORM_SECONDS:
        yield Violation("timeout", f"must be above 0 and at most {MAX_FORM_SECONDS:.0f} s")
    if request.reuse:
        return
    if len(request.secret) != SECRET_BYTES:
        yield Violation("secret", f"must have {SECRET_BYTES} bytes")
    if not request.rendezvous_address:
        yield Violation("rendezvous_address", "must be set")
