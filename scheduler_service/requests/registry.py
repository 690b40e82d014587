"""The requests that are live or ended not long ago, and the gateways that read them. Owns no blocks and no queue.

A request outlives its gateway: without a reader it runs on for the resume window, and its answer is kept for as long
after its end, so that the same or another gateway can ask for all of it. So is the error of one that failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.sampling import FinishReason
from blockyard.retention import Retention
from scheduler_service.requests.request_spans import RequestSpans

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from blockyard.contract.scheduling import ModelFacts, Recovery
    from blockyard.errors import BlockyardError
    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import OwnerUpdate
    from scheduler_service.gateways.codec import Addition
    from scheduler_service.gateways.outbox import GatewayOutbox
    from scheduler_service.replicas.engine import Engine

MAX_RETAINED = 10_000
MAX_RETAINED_TOKENS = 64 * 2**20


class Lost(NamedTuple):
    """What a request lost with its worker, until it goes on. `facts`: those of the replica that it was on."""

    cause: str
    num_tokens: int
    facts: ModelFacts


class Request:
    """A request, its readers, and where it is: at a replica's engine, or in the backlog (None).

    `submission` is the request as its gateway sent it; `handles` the number by which each reader knows it.
    """

    __slots__ = (
        *("digest", "engine", "fails_on_update", "group", "handles", "lost", "num_charged", "submission"),
        "weights_version",
    )

    def __init__(self, group: Group, addition: Addition, weights_version: str) -> None:
        self.group = group
        self.digest = addition.digest
        self.submission = addition.submission
        self.handles: dict[GatewayOutbox, int] = {}
        self.engine: Engine | None = None
        self.lost: Lost | None = None
        self.num_charged = 0
        # The weights' version that its readers know.
        self.weights_version = weights_version
        # Whether it must fail instead of going on with other weights than it began with.
        self.fails_on_update = addition.fails_on_update

    @property
    def request_id(self) -> str:
        return self.group.spec.request_id

    @property
    def has_begun(self) -> bool:
        return self.lost is not None or any(
            sequence.is_known or len(sequence.token_ids) > self.group.prompt_length for sequence in self.group.sequences
        )


class RequestRegistry:
    """Finds requests by name, and passes what is new to the readers of each."""

    def __init__(self, window_seconds: float, clock: Callable[[], float]) -> None:
        self.live: dict[str, Request] = {}
        self.spans = RequestSpans(clock)
        # Called with the id of each request that is live no more.
        self.on_end: Callable[[str], None] = lambda _: None
        self._window_seconds = window_seconds
        self._retained = Retention[str, Request](
            max_age_seconds=window_seconds, max_entries=MAX_RETAINED, max_weight=MAX_RETAINED_TOKENS
        )
        self._errors = Retention[str, "BlockyardError"](
            max_age_seconds=window_seconds, max_entries=MAX_RETAINED, max_weight=MAX_RETAINED
        )
        self._outboxes: dict[str, GatewayOutbox] = {}
        # The gateways that get an owner's updates: one gateway, or all readers of one request.
        self._channels: dict[str, tuple[GatewayOutbox, ...]] = {}
        # Requests without a reader, and when to give them up; the earliest first.
        self._orphans: dict[Request, float] = {}

    def find(self, request_id: str, now: float) -> Request | None:
        self._retained.expire(now)
        return self.live.get(request_id) or self._retained.get(request_id)

    def find_error(self, request_id: str, now: float) -> BlockyardError | None:
        """Finds the error with which a request failed."""
        self._errors.expire(now)
        return self._errors.get(request_id)

    def find_read(self, outbox: GatewayOutbox, request_id: str, handle: int) -> Request | None:
        """Finds the live request that a gateway reads: by its handle, or by its id if the handle is 0."""
        request = self.live.get(outbox.request_ids.get(handle, "") if handle else request_id)
        return request if request is not None and outbox in request.handles else None

    def find_of(self, engine: Engine) -> list[str]:
        return [request_id for request_id, request in self.live.items() if request.engine is engine]

    def add(self, request: Request) -> None:
        self.live[request.request_id] = request
        self._errors.pop(request.request_id)
        self.spans.on_begun(request.group)

    @property
    def outboxes(self) -> list[GatewayOutbox]:
        return list(self._outboxes.values())

    # Readers.

    def add_gateway(self, outbox: GatewayOutbox) -> None:
        self._outboxes[outbox.owner] = outbox
        self._channels[outbox.owner] = (outbox,)

    def remove_gateway(self, outbox: GatewayOutbox, now: float) -> int:
        """Removes a gateway that detached. Returns how many requests have no reader left because of it."""
        num_orphans = 0
        for request_id in list(outbox.request_ids.values()):
            request = self.live[request_id]
            if self.remove_reader(request, outbox):
                self._orphans[request] = now + self._window_seconds
                num_orphans += 1
        del self._channels[outbox.owner]
        del self._outboxes[outbox.owner]
        return num_orphans

    def add_reader(self, request: Request, outbox: GatewayOutbox, handle: int) -> None:
        if outbox in request.handles:
            outbox.request_ids.pop(request.handles[outbox], None)
        request.handles[outbox] = handle
        outbox.request_ids[handle] = request.request_id
        self._orphans.pop(request, None)
        self._route(request)

    def remove_reader(self, request: Request, outbox: GatewayOutbox) -> bool:
        """Removes a gateway from the readers of a request. Returns whether none is left."""
        handle = request.handles.pop(outbox, None)
        if handle is not None:
            outbox.request_ids.pop(handle, None)
        self._route(request)
        return not request.handles

    def _route(self, request: Request) -> None:
        """Sends a request's tokens to its readers: sets the owner by which the core knows them."""
        shared = f"readers of {request.request_id}"
        self._channels.pop(shared, None)
        readers = tuple(request.handles)
        if len(readers) > 1:
            self._channels[shared] = readers
        owner = shared if len(readers) > 1 else readers[0].owner if readers else ""
        if request.group.spec.owner != owner:
            request.group.reassign(owner)

    def publish(self, updates: Mapping[str, OwnerUpdate]) -> None:
        for owner, update in updates.items():
            for outbox in self._channels.get(owner, ()):
                outbox.put_update(update)
        self.spans.on_answered()

    def publish_weights(self, groups: Iterable[Group], version: str) -> None:
        """Reports the weights that requests are now computed with to readers that know of others."""
        for group in groups:
            request = self.live[group.spec.request_id]
            if request.weights_version != version:
                request.weights_version = version
                for outbox in self._channels.get(group.spec.owner, ()):
                    outbox.put_weights([(request.request_id, version)])

    def publish_recoveries(self, recoveries: Mapping[str, list[Recovery]]) -> None:
        """Reports to readers which of their requests go on after a worker was lost."""
        for owner, recovered in recoveries.items():
            for outbox in self._channels.get(owner, ()):
                outbox.put_recovered(recovered)

    # Ends.

    def end(self, groups: Iterable[Group], now: float) -> None:
        """Drops requests that have ended, and retains those that somebody may still want to read."""
        for group in groups:
            request = self.live.get(group.spec.request_id)
            if request is not None and request.group is group:
                self.drop(request)
                self._retain(request, now)

    def _retain(self, request: Request, now: float) -> None:
        reasons = {sequence.finish_reason for sequence in request.group.sequences}
        if request.digest and reasons != {FinishReason.ABORT}:
            num_pooled = sum(len(sequence.pooled) for sequence in request.group.sequences) // 4
            # The request as it came counts too: it may hold a large grammar.
            weight = request.group.prompt_length + request.group.num_outputs + num_pooled + len(request.submission) // 4
            self._retained.add(request.request_id, request, weight, now)

    def retain_error(self, request: Request, error: BlockyardError, now: float) -> None:
        """Retains the error of a request for a client that comes back, unless it says to send the request again."""
        if request.digest and error.retry_after_seconds is None:
            self._errors.add(request.request_id, error, 1, now)

    def drop(self, request: Request) -> None:
        if self.live.pop(request.request_id, None) is not None:
            self.on_end(request.request_id)
            self.spans.on_ended(request.group)
        self._orphans.pop(request, None)
        for outbox in list(request.handles):
            self.remove_reader(request, outbox)

    # Time.

    def take_abandoned(self, now: float) -> list[Request]:
        """Takes the requests that had no reader for the whole window."""
        due = [request for request, at in self._orphans.items() if at <= now]
        for request in due:
            del self._orphans[request]
        self._retained.expire(now)
        return due

    def next_due(self) -> float | None:
        """Returns when `take_abandoned` may next return a request; None: never."""
        return next(iter(self._orphans.values()), None)
