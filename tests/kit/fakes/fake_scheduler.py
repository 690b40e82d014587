"""A scheduler that computes nothing: SchedulerService over a real socket, with tokens from a script.

Gives every live sequence one token a step, ends it by its stop tokens and its length as the real one does, and keeps
what it was sent. Requests outlive their gateways, and their answers their ends, until the test says otherwise. Steps
run by themselves, or one by one when `paused`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from blockyard.admin.v1 import admin_pb2_grpc
from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.common.v1 import sampling_pb2, status_pb2
from blockyard.contract.codec.scheduling import decode_submission
from blockyard.errors import NOT_HEARD_OF, BlockyardError, Reason
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.servers import bind, make_server
from tests.kit.fakes.fake_requests import FakeRequest, FakeSequence, Gateway, Script, StepColumns, failed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc.aio

    from blockyard.contract.scheduling import Submission


NUM_TOKENS_OF_FAILING = 2


def hashed_tokens(request: Submission, index: int, position: int) -> int:
    """Draws tokens from seed, index and position; the first five ids are special ones, and are left out."""
    return 5 + ((request.sampling.seed or 0) + 7919 * index + 104729 * (position + 1)) % 4000


def scripted(*token_ids: int, then: int = 10) -> Script:
    """Makes a script of these tokens for every sequence, and then one for ever."""
    return lambda request, index, position: token_ids[position] if position < len(token_ids) else then


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Use as `async with FakeScheduler(…) as scheduler`; `address` is where it listens.

    Attributes:
        live, retained: its requests by name; a test may take from them.
        added, resubmissions, aborted, asked, cancelled: what came, in order.
        refusals: errors that the requests of these names get.
        failing: sequences, by name and index, that fail instead of getting their third token.
        has_just_begun: it says of names that it does not know that it may hear of them yet.
        accepts: off, what comes is left without an answer.
        rows_per_step: requests that a step gives a token, each in its turn; 0: all of them.
        admin: answers operators from the next start on.
    """

    def __init__(
        self,
        *,
        model_digest: str = "",
        vocab_size: int = 4096,
        max_model_len: int = 1024,
        max_num_seqs: int = 0,
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
            max_num_seqs=max_num_seqs,
        )
        self.script = script
        self.accepts = accepts
        self.rows_per_step = 0
        self.address = "127.0.0.1:0"
        self.num_steps = 0
        self.added: list[Submission] = []
        self.resubmissions: list[scheduler_pb2.Resubmission] = []
        self.aborted: list[scheduler_pb2.AbortRequest] = []
        self.asked: list[str] = []
        # The requests that gateways named as cancelled on attaching.
        self.told_cancelled: list[str] = []
        self.cancelled: list[str] = []
        self.live: dict[str, FakeRequest] = {}
        self.retained: dict[str, FakeRequest] = {}
        self.num_attaches = 0
        self.num_status_calls = 0
        self.status = status_pb2.SchedulerStatus()
        self.admin: admin_pb2_grpc.AdminServiceServicer | None = None
        self.refusals: dict[str, BlockyardError] = {}
        self.has_just_begun = False
        self.failing: dict[tuple[str, int], BlockyardError] = {}
        self._step_seconds = step_seconds
        self._readiness = scheduler_pb2.Readiness(ready=ready, message="" if ready else "the worker loads")
        self._gateways: set[Gateway] = set()
        self._next_sequence_id = 1
        self._num_turns = 0
        self._running = asyncio.Event()
        if not paused:
            self._running.set()
        # Steps without requests would keep the processor busy all through every test.
        self._has_requests = asyncio.Event()
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
        if self.admin is not None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, self._server)
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
        self.forget()

    # What tests do to it, and wait for.

    async def restart(self) -> None:
        """Dies, and is there again at the same address."""
        await self.stop()
        await self.start()

    def forget(self) -> None:
        """Forgets every request."""
        self.live.clear()
        self.retained.clear()

    async def tell_readiness(self, ready: bool, message: str = "") -> None:
        """Changes whether it is ready, and tells every gateway."""
        self._readiness = scheduler_pb2.Readiness(ready=ready, message=message)
        await self.send(scheduler_pb2.AttachResponse(readiness=self._readiness))

    async def send(self, message: scheduler_pb2.AttachResponse) -> None:
        """Sends a message to every gateway."""
        for gateway in self._gateways:
            gateway.put(message)

    async def fail(self, name: str, error: BlockyardError) -> None:
        """Ends a request with an error."""
        request = self.live.pop(name, None)
        for gateway, handle in request.readers.items() if request else ():
            gateway.put(failed(name, handle, error))

    async def break_streams(self, error: BlockyardError | None = None) -> None:
        """Ends every Attach stream and forgets nothing; the gateways may come back at once."""
        for gateway in list(self._gateways):
            gateway.put(error)

    def pause(self) -> None:
        """Takes no more steps by itself."""
        self._running.clear()

    def go_on(self) -> None:
        """Takes steps by itself again."""
        self._running.set()

    async def wait_until(self, condition: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
        """Waits for what comes in: a condition over `added`, `aborted`, `asked`, `num_attaches`, `num_gateways`."""
        async with asyncio.timeout(timeout_seconds), self._changed:
            await self._changed.wait_for(condition)

    @property
    def num_sequences(self) -> int:
        """Sequences that run."""
        return sum(len(request.running) for request in self.live.values())

    @property
    def num_gateways(self) -> int:
        """Gateways that are attached."""
        return len(self._gateways)

    async def step(self, count: int = 1) -> None:
        """Gives every sequence whose turn it is one token, in one message to each gateway."""
        for _ in range(count):
            for gateway in list(self._gateways):
                await gateway.wait_for_room()
            # From here on nothing waits, so that what each gateway is told is in order.
            self.num_steps += 1
            told = {gateway: StepColumns() for gateway in self._gateways}
            for request in self._take_turns():
                self._step(request, [told[gateway] for gateway in request.readers])
            for gateway, columns in told.items():
                if columns.sequence_ids or columns.ended:
                    gateway.put(columns.message())

    # How it works.

    def _take_turns(self) -> list[FakeRequest]:
        """Chooses the requests of the next step."""
        requests = list(self.live.values())
        if not 0 < self.rows_per_step < len(requests):
            return requests
        first = self._num_turns % len(requests)
        self._num_turns = first + self.rows_per_step
        return (requests + requests)[first : self._num_turns]

    def _step(self, request: FakeRequest, told: list[StepColumns]) -> None:
        for sequence in tuple(request.running):
            error = self.failing.get((request.name, sequence.index))
            if error is not None and len(sequence.token_ids) == NUM_TOKENS_OF_FAILING:
                for columns in told:
                    columns.ended.append((sequence.sequence_id, sampling_pb2.FINISH_REASON_ERROR))
                    columns.failures.append((sequence.sequence_id, error))
                sequence.error = error
                self._end(request, sequence, sampling_pb2.FINISH_REASON_ERROR)
                continue
            if not sequence.token_ids and sequence.index == 0:
                for columns in told:
                    columns.prefilled.append(request)
            token_id = self.script(request.message, sequence.index, len(sequence.token_ids))
            sequence.token_ids.append(token_id)
            reason = sequence.ends_by(request.message)
            for columns in told:
                columns.sequence_ids.append(sequence.sequence_id)
                columns.token_ids.append(token_id)
                if request.tells_logprobs:
                    columns.with_logprobs.append((sequence.sequence_id, token_id))
                if reason is not None:
                    columns.ended.append((sequence.sequence_id, reason))
            if reason is not None:
                self._end(request, sequence, reason)

    def _end(self, request: FakeRequest, sequence: FakeSequence, reason: sampling_pb2.FinishReason) -> None:
        sequence.reason = reason
        request.running.remove(sequence)
        if not request.running:
            del self.live[request.name]
            self.retained[request.name] = request

    async def _step_for_ever(self) -> None:
        while True:
            await self._has_requests.wait()
            await self._running.wait()
            await self.step()
            if not self.live:
                self._has_requests.clear()
            await asyncio.sleep(self._step_seconds)

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.AttachResponse]:
        """One gateway."""
        first = await anext(request_iterator)
        gateway = Gateway(first.hello.gateway_id)
        self.told_cancelled += [each.request_id for each in first.hello.cancelled]
        self.num_attaches += 1
        self._gateways.add(gateway)
        yield scheduler_pb2.AttachResponse(facts=self.facts, readiness=self._readiness)
        reading = asyncio.create_task(self._read(gateway, request_iterator))
        try:
            await self._notify()
            while isinstance(message := await gateway.get(), scheduler_pb2.AttachResponse):
                yield message
            if message is not None:
                raise message
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
            self._gateways.discard(gateway)
            gateway.outbox = asyncio.Queue()
            gateway.has_room.set()
            for request in self.live.values():
                request.readers.pop(gateway, None)
            await self._notify()

    async def _read(self, gateway: Gateway, requests: Any) -> None:
        async for message in requests:
            for add in message.add:
                self._add(gateway, add)
            for abort in message.abort:
                self._abort(gateway, abort)
            for resume in message.resume:
                self.asked.append(resume.request_id)
                self._resume(gateway, resume.request_id, resume.handle)
            await self._notify()

    def _add(self, gateway: Gateway, add: scheduler_pb2.AddRequest) -> None:
        submission = decode_submission(add.submission)
        name, handle = submission.request_id, add.handle
        self.added.append(submission)
        if add.HasField("resubmission"):
            self.resubmissions.append(add.resubmission)
        if not self.accepts:
            return
        if name in self.refusals:
            gateway.put(failed(name, handle, self.refusals[name]))
            return
        if known := self.live.get(name) or self.retained.get(name):
            if known.message.digest == submission.digest:
                self._resume(gateway, name, handle)
            else:
                conflict = BlockyardError(Reason.REQUEST_ID_CONFLICT, f"{name} is another request")
                gateway.put(failed(name, handle, conflict))
            return
        request = FakeRequest(add, submission, self._next_sequence_id)
        self._next_sequence_id += submission.n
        accepted = scheduler_pb2.RequestAccepted(
            request_id=name, first_sequence_id=request.first_sequence_id, handle=handle
        )
        gateway.put(scheduler_pb2.AttachResponse(accepted=[accepted]))
        request.readers[gateway] = handle
        (self.live if request.running else self.retained)[name] = request
        self._has_requests.set()

    def _resume(self, gateway: Gateway, name: str, handle: int) -> None:
        request = self.live.get(name) or self.retained.get(name)
        if request is None:
            error = BlockyardError(Reason.REQUEST_EXPIRED, f"{name} is not known")
            if self.has_just_begun:
                error = BlockyardError(Reason.NO_READY_WORKER, f"{name} is not known yet", (), 0.01, dict(NOT_HEARD_OF))
            gateway.put(failed(name, handle, error))
            return
        request.readers[gateway] = handle
        gateway.put(scheduler_pb2.AttachResponse(resumed=[request.resumed(handle)]))

    def _abort(self, gateway: Gateway, abort: scheduler_pb2.AbortRequest) -> None:
        self.aborted.append(abort)
        request = self.live.get(abort.request_id)
        if request is None or request.readers.get(gateway) != abort.handle:
            return
        if not abort.HasField("sequence_index"):
            del request.readers[gateway]
            if not request.readers:
                del self.live[abort.request_id]
            return
        for sequence in tuple(request.running):
            if sequence.index == abort.sequence_index:
                del sequence.token_ids[abort.num_tokens :]
                self._end(request, sequence, sampling_pb2.FINISH_REASON_STOP)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def CancelRequests(self, request: Any, context: Any) -> scheduler_pb2.CancelRequestsResponse:
        """Ends requests, whoever reads them."""
        running = [name for name in request.request_ids if name in self.live]
        self.cancelled.extend(request.request_ids)
        for name in running:
            await self.fail(name, BlockyardError(Reason.CLIENT_CANCELLED, "the request was cancelled"))
        await self._notify()
        told = scheduler_pb2.CancelRequestsResponse(cancelled_request_ids=running)
        if self.has_just_begun:
            known = self.live.keys() | self.retained.keys() | set(running)
            told.pending_request_ids.extend(name for name in request.request_ids if name not in known)
        return told

    async def GetSchedulerStatus(self, request: Any, context: Any) -> scheduler_pb2.GetSchedulerStatusResponse:
        """Answers with a little."""
        self.num_status_calls += 1
        self.status.num_gateways = len(self._gateways)
        return scheduler_pb2.GetSchedulerStatusResponse(status=self.status)
