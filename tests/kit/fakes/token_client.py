"""A gateway in miniature: attaches to a scheduler, adds requests of token ids, collects what comes for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from hashlib import sha256
from math import isnan, nan
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.protobuf import message as protobuf

from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, from_status, to_status
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.servers import channel_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECONDS = 20.0
# Of every request.
SEED = 17


@dataclass
class Stream:
    """One request as its gateway sees it: for each of its sequences the ids so far and the reason of its end."""

    request_id: str
    n: int
    first_sequence_id: int | None = None
    token_ids: list[list[int]] = field(default_factory=list)
    reasons: dict[int, int] = field(default_factory=dict)
    # Of a beam search's sequences.
    scores: dict[int, float] = field(default_factory=dict)
    # Of those that failed.
    errors: dict[int, BlockyardError] = field(default_factory=dict)
    num_cached_tokens: int | None = None
    error: BlockyardError | None = None
    recovered: list[scheduler_pb2.RequestRecovered] = field(default_factory=list)
    # The tokens of its first sequence that had come when it was recovered.
    recovered_at: list[int] = field(default_factory=list)
    # What it was added with, and what a resume told of it.
    submission: bytes = b""
    handle: int = 0
    resumed: list[scheduler_pb2.RequestResumed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.n)]

    @property
    def is_done(self) -> bool:
        """Every sequence ended, or the request failed."""
        return self.error is not None or len(self.reasons) == self.n


class TokenClient:
    """Use as an async context manager; a reader task collects what comes until `pause`."""

    def __init__(self, address: str, gateway_id: str = "gateway", window_bytes: int = 0) -> None:
        self.streams: dict[str, Stream] = {}
        self.facts: scheduler_pb2.ModelFacts | None = None
        self.readiness: scheduler_pb2.Readiness | None = None
        # By name, as the scheduler said last; told to it on attaching.
        self.loras: dict[str, scheduler_pb2.LoraAdapter] = {}
        # The seconds since each request was cancelled, which the scheduler is told on attaching.
        self.cancelled: dict[str, float] = {}
        self.num_messages = 0
        self.end: BaseException | None = None
        self._by_sequence: dict[int, tuple[Stream, int]] = {}
        # What may be on its way to a client that does not read; 0: as much as gRPC likes.
        window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes)] if window_bytes else []
        options = [*channel_options(INTERNAL_MESSAGE_BYTES), *window]
        self._channel = grpc.aio.insecure_channel(address, options)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._gateway_id = gateway_id
        self._num_handles = 0
        self._writing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def __aenter__(self) -> TokenClient:
        self.call: Any = self._stub.Attach()
        hello = scheduler_pb2.Hello(gateway_id=self._gateway_id, loras=self.loras.values())
        for request_id, seconds in self.cancelled.items():
            hello.cancelled.add(request_id=request_id).age.FromNanoseconds(int(seconds * 1e9))
        await self.call.write(scheduler_pb2.AttachRequest(hello=hello))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        self.call.cancel()
        await asyncio.wait({self._reader})
        await self._channel.close()

    async def status(self) -> Any:
        """Asks for the scheduler's status."""
        response = await self._stub.GetSchedulerStatus(scheduler_pb2.GetSchedulerStatusRequest())
        return response.status

    def pause(self) -> None:
        """Reads nothing more, as a gateway that hangs."""
        self._may_read.clear()

    def resume(self) -> None:
        """Reads again."""
        self._may_read.set()

    async def _read(self) -> None:
        try:
            while True:
                await self._may_read.wait()
                message = await self.call.read()
                if not isinstance(message, protobuf.Message):
                    return
                self._take(message)
                async with self._changed:
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.end = error
        finally:
            async with self._changed:
                self._changed.notify_all()

    def _take(self, message: Any) -> None:
        self.num_messages += 1
        if message.HasField("facts"):
            self.facts = message.facts
        if message.HasField("readiness"):
            self.readiness = message.readiness
        if message.HasField("loras"):
            self.loras = {adapter.name: adapter for adapter in message.loras.adapters}
        for accepted in message.accepted:
            stream = self.streams[accepted.request_id]
            assert stream.first_sequence_id is None
            stream.first_sequence_id = accepted.first_sequence_id
            for index in range(stream.n):
                self._by_sequence[accepted.first_sequence_id + index] = (stream, index)
        for resumed in message.resumed:
            self._take_resumed(resumed)
        for recovered in message.recovered:
            stream = self.streams[recovered.request_id]
            stream.recovered.append(recovered)
            stream.recovered_at.append(len(stream.token_ids[0]))
        for sequence_id, token_id in zip(message.sequence_ids, message.token_ids, strict=True):
            stream, index = self._by_sequence[sequence_id]
            assert index not in stream.reasons, "a token after the end"
            stream.token_ids[index].append(token_id)
        self._take_ends(message)
        for sequence_id, cached in zip(message.prefilled_sequence_ids, message.num_cached_tokens, strict=True):
            owner = next((s for s in self.streams.values() if s.first_sequence_id == sequence_id), None)
            assert owner is not None
            owner.num_cached_tokens = cached
        for failed in message.failed:
            self.streams[failed.request_id].error = from_status(failed.status)

    def _take_ends(self, message: Any) -> None:
        scores = message.finish_scores or [nan] * len(message.finish_reasons)
        ends = zip(message.finished_sequence_ids, message.finish_reasons, scores, strict=True)
        ended: dict[int, tuple[Stream, int]] = {}
        for sequence_id, reason, score in ends:
            stream, index = ended[sequence_id] = self._by_sequence.pop(sequence_id)
            assert index not in stream.reasons, "two ends"
            stream.reasons[index] = reason
            if not isnan(score):
                stream.scores[index] = score
        for failure in message.sequence_failures:
            stream, index = ended[failure.sequence_id]
            stream.errors[index] = from_status(failure.status)

    def _take_resumed(self, resumed: scheduler_pb2.RequestResumed) -> None:
        """All of a request so far: what comes after it, comes behind it."""
        stream = self.streams[scheduler_pb2.Submission.FromString(resumed.submission).request_id]
        stream.submission, stream.handle = resumed.submission, resumed.handle
        stream.resumed.append(resumed)
        stream.first_sequence_id = resumed.first_sequence_id
        for index, sequence in enumerate(resumed.sequences):
            stream.token_ids[index] = list(sequence.token_ids)
            if sequence.HasField("score"):
                stream.scores[index] = sequence.score
            if sequence.HasField("error"):
                stream.errors[index] = from_status(sequence.error)
            if sequence.finish_reason:
                stream.reasons[index] = sequence.finish_reason
            else:
                self._by_sequence[resumed.first_sequence_id + index] = (stream, index)

    def _next_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles

    async def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = 8,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        **more: Any,
    ) -> Stream:
        """Sends a request; `more`: other fields of Submission, and the age of AddRequest."""
        age = more.pop("age", None)
        submission = scheduler_pb2.Submission(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            n=n,
            sampling=sampling_pb2.SamplingParams(temperature=0.0, seed=SEED).SerializeToString(),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            **more,
        )
        submission.digest = submission.digest or sha256(submission.SerializeToString(deterministic=True)).digest()
        stream = self.streams[request_id] = Stream(request_id, n, submission=submission.SerializeToString())
        await self.send(stream, scheduler_pb2.AddRequest(submission=stream.submission, age=age))
        return stream

    async def _write(self, message: scheduler_pb2.AttachRequest) -> None:
        async with self._writing:
            await self.call.write(message)

    async def send(self, stream: Stream, add: scheduler_pb2.AddRequest) -> None:
        """Sends a request as it is, with a handle of its own."""
        stream.handle = add.handle = self._next_handle()
        await self._write(scheduler_pb2.AttachRequest(add=[add]))

    async def read_again(self, request_id: str, n: int = 1) -> Stream:
        """Asks for a request of another gateway, or of before."""
        stream = self.streams[request_id] = Stream(request_id, n)
        resume = scheduler_pb2.ResumeRequest(request_id=request_id, handle=self._next_handle())
        await self._write(scheduler_pb2.AttachRequest(resume=[resume]))
        return stream

    async def resubmit(self, lost: Stream, age_seconds: float = 0.0) -> Stream:
        """Sends a request again that another stream, or another scheduler, had: with all that came of it."""
        stream = self.streams[lost.request_id] = Stream(lost.request_id, lost.n, submission=lost.submission)
        stream.token_ids = [list(token_ids) for token_ids in lost.token_ids]
        stream.reasons = dict(lost.reasons)
        stream.errors = dict(lost.errors)
        add = scheduler_pb2.AddRequest(submission=lost.submission)
        add.resubmission.age.FromNanoseconds(int(age_seconds * 1e9))
        for index, token_ids in enumerate(lost.token_ids):
            reason: Any = lost.reasons.get(index, 0)
            told = add.resubmission.sequences.add(token_ids=token_ids, finish_reason=reason)
            if index in lost.errors:
                told.error.CopyFrom(to_status(lost.errors[index]))
        await self.send(stream, add)
        return stream

    async def cancel(self, *request_ids: str) -> list[str]:
        """Ends requests, whoever reads them; returns those that ran."""
        return list((await self.try_to_cancel(*request_ids)).cancelled_request_ids)

    async def try_to_cancel(self, *request_ids: str) -> scheduler_pb2.CancelRequestsResponse:
        """The same; returns the whole answer."""
        return await self._stub.CancelRequests(scheduler_pb2.CancelRequestsRequest(request_ids=request_ids))

    async def abort(
        self, request_id: str, sequence_index: int | None = None, *, stop: bool = False, num_tokens: int = 0
    ) -> None:
        """Ends a request or one of its sequences: cancelled, or because a stop string matched."""
        reason = scheduler_pb2.ABORT_REASON_STOP_STRING if stop else scheduler_pb2.ABORT_REASON_CLIENT
        abort = scheduler_pb2.AbortRequest(
            request_id=request_id,
            sequence_index=sequence_index,
            reason=reason,
            num_tokens=num_tokens,
            handle=self.streams[request_id].handle if request_id in self.streams else 0,
        )
        await self._write(scheduler_pb2.AttachRequest(abort=[abort]))

    async def wait_until(self, condition: Callable[[], Any], seconds: float = SECONDS) -> None:
        """Waits until a condition over what has come holds, or the stream has ended."""
        async with asyncio.timeout(seconds), self._changed:
            while not condition():
                assert not self._reader.done(), f"the stream has ended: {self.end!r}"
                await self._changed.wait()

    async def wait_until_ready(self) -> None:
        """Waits until requests can be served."""
        await self.wait_until(lambda: self.readiness is not None and self.readiness.ready)

    async def wait_for_end(self, seconds: float = SECONDS) -> BaseException | None:
        """Waits until the scheduler ends the stream, and gives the error that it ended with."""
        await asyncio.wait_for(asyncio.shield(self._reader), seconds)
        return self.end

    async def result(self, stream: Stream) -> list[list[int]]:
        """Waits until a request is done and gives its sequences' ids; raises its error."""
        await self.wait_until(lambda: stream.is_done)
        if stream.error:
            raise stream.error
        return stream.token_ids
