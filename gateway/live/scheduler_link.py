"""Keeps an Attach stream open to the scheduler, and opens it again when it breaks.

All items that are sent in one turn of the event loop go into one message. When the stream breaks, the receiver is
notified; after the next attach it sends its requests again, once the model's facts have arrived.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.clock import SYSTEM, Clock
from blockyard.contract.codec import scheduling as codec
from blockyard.contract.codec.messages import encode_seconds
from blockyard.contract.codec.progress import decode_progress
from blockyard.contract.scheduling import (
    Abort,
    Adapter,
    Add,
    Failure,
    Progress,
    Resume,
)
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.retention import Retention
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.roots import start_task
from blockyard.service.servers import RenewedChannel, internal_channel
from blockyard.telemetry import EventLogger
from blockyard.transport import GRPC, Transport
from gateway.codec.readings import decode_reading
from gateway.live.scheduler_readiness import SchedulerReadiness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blockyard.common.v1 import status_pb2
    from blockyard.security.tls import Peer
    from gateway.readings import SchedulerReading

log = EventLogger(__name__)

FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 0.5
# A missing scheduler is not logged as a warning until this time after the start: services may start in any order.
START_SECONDS = 10.0
_STOPPING = "the gateway is stopping"
# The most bytes of requests in one message, unless a single request is larger. A message may have 64 MiB.
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_CANCEL_TIMEOUT_SECONDS = 5.0
# How long the next scheduler is told of a cancellation, and of how many.
_CANCELLED_SECONDS = 60.0
_MAX_CANCELLED = 10_000


Outgoing = Add | Resume | Abort


class Cancelled(NamedTuple):
    """The result of a cancel, as names of requests.

    `cancelled`: requests that were running. `pending`: requests that a gateway may still send to the scheduler.
    """

    cancelled: Sequence[str] = ()
    pending: Sequence[str] = ()


class SchedulerLink(SchedulerReadiness):
    """Keeps one gateway attached to its scheduler.

    Args:
        address: the scheduler's address.
        gateway_id: a random id of the gateway's process.
        model_digest: SHA-256 of this gateway's config.json, in hex.
        peer: the credentials for the scheduler.
        model_name: the model's name, for the log.
        starts_on_demand: whether a scheduler that stops has only been unloaded, which is no reason for a warning.

    Attributes:
        loras: the adapters that requests may use, by name, as last reported. They are sent to the next scheduler.
        is_attached: whether the scheduler answers.
    """

    _on_progress: Callable[[Progress], None]
    _on_lost: Callable[[], None]

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        model_digest: str,
        peer: Peer | None = None,
        model_name: str = "",
        starts_on_demand: bool = False,
        clock: Clock = SYSTEM,
        transport: Transport = GRPC,
    ) -> None:
        self.address = address
        self._model_name = model_name
        self._starts_on_demand = starts_on_demand
        self._peer = peer
        self._clock = clock
        self._transport = transport
        self._gateway_id = gateway_id
        super().__init__(model_digest, self._unreachable())
        self.loras: Mapping[str, Adapter] = {}
        # When requests were cancelled through this gateway, by their ids.
        self._cancelled_at = Retention[str, float](
            max_age_seconds=_CANCELLED_SECONDS, max_entries=_MAX_CANCELLED, max_weight=_MAX_CANCELLED
        )
        self._outgoing: list[Outgoing] = []
        self._has_outgoing = asyncio.Event()
        self.is_attached = False
        self._created_at = clock.monotonic()
        # Whether a scheduler was attached before, or its absence was logged. Losing it later logs another warning.
        self._has_warned = False
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: RenewedChannel | None = None

    def _unreachable(self) -> str:
        return f"the scheduler at {self.address} does not answer"

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition is true. Checks it whenever the scheduler's readiness or adapters change."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def start(self, on_progress: Callable[[Progress], None], on_lost: Callable[[], None]) -> None:
        """Connects. `on_lost`: called when the stream has broken: items that were sent on it will not be answered."""
        self._on_progress, self._on_lost = on_progress, on_lost
        self._channel = RenewedChannel(self.address, self._peer, self._transport)
        self._task = start_task(self._run(), "scheduler link")

    async def stop(self) -> None:
        """Detaches from the scheduler, which keeps this gateway's requests for the resume window."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._channel is not None:
            await self._channel.close()

    def send(self, item: Outgoing) -> None:
        """Sends an item. While no scheduler is attached, the item is dropped."""
        if self.is_attached:
            self._outgoing.append(item)
            self._has_outgoing.set()

    async def cancel(self, request_ids: Sequence[str]) -> Cancelled:
        """Cancels requests of any gateway. Raises BlockyardError NO_READY_WORKER.

        The next scheduler is told of the cancellation too: this one may not have heard of it, or may end before other
        gateways hear of it.
        """
        assert self._channel is not None
        now = self._clock.monotonic()
        for request_id in request_ids:
            self._cancelled_at.add(request_id, now, 1, now)
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel.get())
        request = scheduler_pb2.CancelRequestsRequest(request_ids=request_ids)
        try:
            answer: Any = await stub.CancelRequests(  # type: ignore[misc]
                request, timeout=_CANCEL_TIMEOUT_SECONDS, wait_for_ready=True
            )
        except grpc.RpcError as error:
            message = f"the scheduler did not take the cancellation: {from_rpc_error(error).message}"
            raise BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=1.0) from None
        return Cancelled(tuple(answer.cancelled_request_ids), tuple(answer.pending_request_ids))

    def channel(self) -> grpc.aio.Channel:
        """Returns the connection for calls outside of the stream. Must be called after `start`."""
        assert self._channel is not None
        return self._channel.get()

    async def get_status(self, timeout_seconds: float) -> status_pb2.SchedulerStatus:
        """Asks the scheduler for its status; raises grpc.RpcError if it does not answer."""
        assert self._channel is not None
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel.get())
        request = scheduler_pb2.GetSchedulerStatusRequest()
        answer: Any = await stub.GetSchedulerStatus(request, timeout=timeout_seconds)  # type: ignore[misc]
        return answer.status

    async def read_scheduler(self, timeout_seconds: float) -> SchedulerReading:
        """Asks the scheduler for its load; raises grpc.RpcError if it does not answer."""
        return decode_reading(await self.get_status(timeout_seconds))

    async def _run(self) -> None:
        delay = FIRST_DELAY_SECONDS
        while True:
            was_attached = True
            try:
                was_attached = await self._attach()
            except Exception:
                log.exception("the connection to the scheduler failed: a message could not be applied or sent")
            delay = FIRST_DELAY_SECONDS if was_attached else min(2 * delay, MAX_DELAY_SECONDS)
            # Random delays spread out gateways that lost one scheduler at the same time.
            await asyncio.sleep(delay * self._clock.random.uniform(0.5, 1.0))

    async def _attach(self) -> bool:
        """Runs one stream to its end; returns whether the scheduler has sent a message on it."""
        # Open a new connection: a failed one waits before it retries, although the scheduler may already be back.
        channel = internal_channel(self.address, self._peer, self._transport)
        call: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel).Attach()  # type: ignore[call-arg]
        directions: list[asyncio.Task[None]] = []
        reason, has_stopped = self._unreachable(), False
        try:
            await call.write(scheduler_pb2.AttachRequest(hello=self._make_hello()))
            directions += (asyncio.create_task(direction(call)) for direction in (self._read, self._write))
            await _wait_for_end(*directions)
            reason = "the scheduler closed the connection"
        except grpc.RpcError as error:
            decoded = from_rpc_error(error)
            reason, has_stopped = self._reason_of(decoded), decoded.reason is Reason.DRAINING
        except asyncio.CancelledError:
            reason = _STOPPING
            raise
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            call.cancel()
            await channel.close(None)
            was_attached = self.is_attached
            self._on_detached(reason, has_stopped=has_stopped)
        return was_attached

    def _make_hello(self) -> scheduler_pb2.Hello:
        now = self._clock.monotonic()
        self._cancelled_at.expire(now)
        hello = scheduler_pb2.Hello(gateway_id=self._gateway_id, loras=map(codec.encode_adapter, self.loras.values()))
        for request_id, cancelled_at in self._cancelled_at.items():
            hello.cancelled.add(request_id=request_id, age=encode_seconds(now - cancelled_at))
        return hello

    def _reason_of(self, error: BlockyardError) -> str:
        log.debug("attach ended", reason=str(error.reason), message=error.message)
        if self.is_attached:
            return f"the connection to the scheduler was lost: {error.message}"
        return f"{self._unreachable()}: {error.message}"

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            progress = decode_progress(message)
            if not self.is_attached:
                self.is_attached = self._has_warned = True
                log.info("attached to the scheduler", address=self.address)
            if self._apply(progress):
                self._changed.set()
            if progress.loras is not None:
                self.loras = {adapter.name: adapter for adapter in progress.loras}
                self._changed.set()
            self._on_progress(progress)

    def _on_detached(self, reason: str, *, has_stopped: bool) -> None:
        """Notes that no scheduler is attached. `has_stopped`: the scheduler ended the stream because it was stopped."""
        was_attached, self.is_attached = self.is_attached, False
        self._detach(reason)
        self._outgoing.clear()
        if was_attached:
            if has_stopped and self._starts_on_demand:
                log.info("the model was unloaded", model=self._model_name)
            elif reason != _STOPPING:
                log.warning("lost the scheduler", address=self.address, reason=reason)
            self._on_lost()
        elif (
            reason != _STOPPING and not self._has_warned and self._clock.monotonic() - self._created_at >= START_SECONDS
        ):
            self._has_warned = True
            log.warning("no scheduler", reason=reason)
        self._changed.set()

    async def _write(self, call: Any) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            outgoing, self._outgoing = self._outgoing, []
            for message in _batches(outgoing):
                if message.ByteSize() > INTERNAL_MESSAGE_BYTES:
                    self._refuse(message)
                try:
                    await call.write(message)
                except (grpc.RpcError, asyncio.InvalidStateError):
                    # `_read` raises the cause.
                    return

    def _refuse(self, message: scheduler_pb2.AttachRequest) -> None:
        """Fails the request in a message that is too large to send; otherwise it would block all other requests."""
        error = BlockyardError(
            Reason.MESSAGE_TOO_LARGE,
            "the request and its answer so far are larger than one message to the scheduler may be",
        )
        failed = [Failure(add.handle, error) for add in message.add]
        message.ClearField("add")
        self._on_progress(Progress(failed=failed))


async def _wait_for_end(reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
    """Waits until a stream has ended; raises the error that ended it, or the writer's error."""
    await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
    if writer.done():
        writer.result()
    await reader


def _batches(outgoing: Sequence[Outgoing]) -> Iterator[scheduler_pb2.AttachRequest]:
    """Packs items into messages.

    The scheduler reads the adds of a message first, then its aborts, then its look-ups. An item that would be read out
    of order, such as an add after an abort, begins a new message.
    """
    message, rank, num_bytes = scheduler_pb2.AttachRequest(), 0, 0
    for item in outgoing:
        add = codec.encode_add(item) if isinstance(item, Add) else None
        # Measure the encoded size: grammars, log probabilities and gateway state may exceed all tokens.
        size = add.ByteSize() if add is not None else 0
        if _RANKS[type(item)] < rank or (message.add and num_bytes + size > _MAX_MESSAGE_BYTES):
            yield message
            message, num_bytes = scheduler_pb2.AttachRequest(), 0
        rank = _RANKS[type(item)]
        num_bytes += size
        if add is not None:
            message.add.append(add)
        elif isinstance(item, Abort):
            message.abort.append(codec.encode_abort(item))
        elif isinstance(item, Resume):
            message.resume.append(codec.encode_resume(item))
    yield message


_RANKS: dict[type[Outgoing], int] = {Add: 0, Abort: 1, Resume: 2}
