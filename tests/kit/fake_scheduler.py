"""A scheduler that computes nothing: SchedulerService over a real socket, with tokens from a script.

Gives every live sequence one token a step, ends it by its stop tokens and its length as the real one does, and keeps
what it was sent. Steps run by themselves, or one by one when `paused`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import sampling_pb2, status_pb2
from blockyard.errors import BlockyardError, to_status
from blockyard.rpc import INTERNAL_MESSAGE_BYTES, bind, make_server
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

if TYPE_CHECKING:
    import grpc.aio

# The token at a position of a sequence: (request, sequence index, position) -> id.
Script = Callable[[scheduler_pb2.AddRequest, int, int], int]


def hashed_tokens(request: scheduler_pb2.AddRequest, index: int, position: int) -> int:
    """Draws tokens from seed, index and position; the first five ids are special ones, and are left out."""
    return 5 + (request.sampling.seed + 7919 * index + 104729 * (position + 1)) % 4000


def scripted(*token_ids: int, then: int = 10) -> Script:
    """Gives these tokens to every sequence, and then one for ever."""
    return lambda request, index, position: token_ids[position] if position < len(token_ids) else then


@dataclass
class _Sequence:
    sequence_id: int
    request: scheduler_pb2.AddRequest
    index: int
    num_tokens: int = 0


@dataclass(eq=False)
class _Attached:
    gateway_id: str
    outbox: asyncio.Queue[scheduler_pb2.AttachResponse | None] = field(default_factory=lambda: asyncio.Queue(maxsize=4))
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    requests: dict[str, list[int]] = field(default_factory=dict)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Use as `async with FakeScheduler(…) as scheduler`; `address` is where it listens."""

    def __init__(
        self,
        *,
        model_digest: str = "",
        vocab_size: int = 4096,
        max_model_len: int = 1024,
        script: Script = hashed_tokens,
        ready: bool = True,
        paused: bool = False,
        accepts: bool = True,
        step_seconds: float = 0.0,
    ) -> None:
        self.facts = scheduler_pb2.ModelFacts(
            model_digest=model_digest,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=16,
            determinism_id="fake",
            batch_invariant=True,
        )
        self.script = script
        self.accepts = accepts
        self.address = "127.0.0.1:0"
        self.num_steps = 0
        self.added: list[scheduler_pb2.AddRequest] = []
        self.aborted: list[scheduler_pb2.AbortRequest] = []
        self.num_attaches = 0
        self.refusals: dict[str, BlockyardError] = {}
        self._step_seconds = step_seconds
        self._readiness = scheduler_pb2.Readiness(ready=ready, message="" if ready else "the worker loads")
        self._attached: set[_Attached] = set()
        self._next_sequence_id = 1
        self._running = asyncio.Event()
        if not paused:
            self._running.set()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._stepping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeScheduler:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens: at a free port, and after a stop at the same one."""
        self._server = make_server(INTERNAL_MESSAGE_BYTES, ["blockyard.scheduler.v1.SchedulerService"])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        port = bind(self._server, self.address)
        if not self.address.startswith("unix:"):
            self.address = f"127.0.0.1:{port}"
        await self._server.start()
        self._stepping = asyncio.create_task(self._step_for_ever())

    async def stop(self) -> None:
        """Dies: every stream breaks and everything is forgotten."""
        assert self._server is not None and self._stepping is not None
        self._stepping.cancel()
        await asyncio.wait([self._stepping])
        await self._server.stop(0)

    # What tests do to it, and wait for.

    async def tell_readiness(self, ready: bool, message: str = "") -> None:
        """Changes whether it is ready, and tells every gateway."""
        self._readiness = scheduler_pb2.Readiness(ready=ready, message=message)
        await self.send(scheduler_pb2.AttachResponse(readiness=self._readiness))

    async def send(self, message: scheduler_pb2.AttachResponse) -> None:
        """Sends a message to every gateway."""
        for attached in self._attached:
            await attached.outbox.put(message)

    async def fail(self, request_id: str, error: BlockyardError) -> None:
        """Ends a request with an error."""
        for attached in self._attached:
            if request_id in attached.requests:
                self._forget(attached, request_id)
                failed = scheduler_pb2.RequestFailed(request_id=request_id, status=to_status(error))
                await attached.outbox.put(scheduler_pb2.AttachResponse(failed=[failed]))

    async def break_streams(self) -> None:
        """Ends every Attach stream; the gateways may come back at once."""
        for attached in list(self._attached):
            await attached.outbox.put(None)

    def pause(self) -> None:
        """Takes no more steps by itself."""
        self._running.clear()

    def go_on(self) -> None:
        """Takes steps by itself again."""
        self._running.set()

    async def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
        """Waits for what comes in: a condition over `added`, `aborted`, `num_attaches`."""
        async with asyncio.timeout(timeout_seconds), self._changed:
            await self._changed.wait_for(condition)

    @property
    def num_sequences(self) -> int:
        """Sequences that run."""
        return sum(len(attached.sequences) for attached in self._attached)

    async def step(self) -> None:
        """Gives every sequence of every gateway one token, in one message."""
        self.num_steps += 1
        for attached in list(self._attached):
            message = self._step(attached)
            if message.sequence_ids:
                await attached.outbox.put(message)

    # How it works.

    def _step(self, attached: _Attached) -> scheduler_pb2.AttachResponse:
        sequences = list(attached.sequences.values())
        token_ids = [self.script(s.request, s.index, s.num_tokens) for s in sequences]
        message = scheduler_pb2.AttachResponse(
            sequence_ids=[s.sequence_id for s in sequences],
            token_ids=token_ids,
            prefilled_sequence_ids=[s.sequence_id for s in sequences if s.num_tokens == 0 and s.index == 0],
        )
        message.num_cached_tokens.extend([0] * len(message.prefilled_sequence_ids))
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            reason = self._end_of(sequence, token_id)
            if reason is not None:
                message.finished_sequence_ids.append(sequence.sequence_id)
                message.finish_reasons.append(reason)
                self._end(attached, sequence)
        return message

    def _end_of(self, sequence: _Sequence, token_id: int) -> sampling_pb2.FinishReason | None:
        request = sequence.request
        sequence.num_tokens += 1
        if token_id in request.stop_token_ids and sequence.num_tokens > request.min_tokens:
            return sampling_pb2.FINISH_REASON_STOP
        return sampling_pb2.FINISH_REASON_LENGTH if sequence.num_tokens >= request.max_tokens else None

    def _end(self, attached: _Attached, sequence: _Sequence) -> None:
        del attached.sequences[sequence.sequence_id]
        left = attached.requests[sequence.request.request_id]
        left.remove(sequence.sequence_id)
        if not left:
            del attached.requests[sequence.request.request_id]

    def _forget(self, attached: _Attached, request_id: str) -> None:
        for sequence_id in attached.requests.pop(request_id, ()):
            del attached.sequences[sequence_id]

    async def _step_for_ever(self) -> None:
        while True:
            await self._running.wait()
            await self.step()
            await asyncio.sleep(self._step_seconds)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """One gateway."""
        first = await anext(request_iterator)
        attached = _Attached(first.hello.gateway_id)
        self.num_attaches += 1
        self._attached.add(attached)
        yield scheduler_pb2.AttachResponse(facts=self.facts, readiness=self._readiness)
        reading = asyncio.create_task(self._read(attached, request_iterator))
        try:
            await self._notify()
            while (message := await attached.outbox.get()) is not None:
                yield message
        finally:
            self._attached.discard(attached)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _read(self, attached: _Attached, requests: Any) -> None:
        async for message in requests:
            for request in message.add:
                await self._add(attached, request)
            for abort in message.abort:
                self._abort(attached, abort)
            await self._notify()

    async def _add(self, attached: _Attached, request: scheduler_pb2.AddRequest) -> None:
        request_id = request.request_id
        self.added.append(request)
        if request_id in self.refusals:
            failed = scheduler_pb2.RequestFailed(request_id=request_id, status=to_status(self.refusals[request_id]))
            await attached.outbox.put(scheduler_pb2.AttachResponse(failed=[failed]))
            return
        assert request_id not in attached.requests, f"{request_id} is live"
        if not self.accepts:
            return
        first = self._next_sequence_id
        self._next_sequence_id += request.n
        attached.requests[request_id] = list(range(first, first + request.n))
        accepted = scheduler_pb2.RequestAccepted(request_id=request_id, first_sequence_id=first)
        await attached.outbox.put(scheduler_pb2.AttachResponse(accepted=[accepted]))
        # Only now, so that no token goes before its acceptance.
        for index in range(request.n):
            attached.sequences[first + index] = _Sequence(first + index, request, index)

    def _abort(self, attached: _Attached, abort: scheduler_pb2.AbortRequest) -> None:
        self.aborted.append(abort)
        if not abort.HasField("sequence_index"):
            self._forget(attached, abort.request_id)
            return
        for sequence_id in list(attached.requests.get(abort.request_id, ())):
            if attached.sequences[sequence_id].index == abort.sequence_index:
                self._end(attached, attached.sequences[sequence_id])

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def GetSchedulerStatus(self, request: Any, context: Any) -> scheduler_pb2.GetSchedulerStatusResponse:
        """Tells a little."""
        status = status_pb2.SchedulerStatus(num_gateways=len(self._attached))
        return scheduler_pb2.GetSchedulerStatusResponse(status=status)
