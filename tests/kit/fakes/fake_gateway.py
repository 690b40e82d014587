"""A gateway without a scheduler, on real sockets: it answers with the prompt's own words, and fails as it is told to.

Several of them that share a `Memory` are the gateways of one system: what one has begun another reads on.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.security.authentication import find_key
from blockyard.service.health import add_health
from blockyard.service.servers import bind, make_server
from tests.kit.fakes.fake_answers import DEFAULT_MAX_TOKENS, MODEL, Memory, events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterable

    from blockyard.security.authentication import Gate
    from tests.kit.fakes.fake_answers import Event, Spec


class How(StrEnum):
    """How a stream breaks."""

    DRAINING = "the gateway ends it with DRAINING"
    UNAVAILABLE = "a plain status UNAVAILABLE"
    CANCELLED = "a plain status CANCELLED"
    INTERNAL = "a plain status INTERNAL"
    GAP = "an event is left out"
    END = "it ends OK"
    DEATH = "the gateway dies"
    RESTART = "the gateway dies and comes back with nothing in its memory"


_PLAIN_CODE = {
    How.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    How.CANCELLED: grpc.StatusCode.CANCELLED,
    How.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True)
class Cut:
    """Breaks one stream after so many events; with an error it is this that the gateway tells."""

    num_events: int
    how: How | BlockyardError = How.DRAINING


class _Administration(admin_pb2_grpc.AdminServiceServicer):
    """Tells how a fake gateway is, and what is behind it."""

    def __init__(self, gateway: FakeGateway) -> None:
        self._gateway = gateway

    async def GetStatus(self, request: Any, context: Any) -> admin_pb2.GetStatusResponse:  # type: ignore[override]
        status = admin_pb2.GetStatusResponse(gateway=admin_pb2.GatewayStatus(ready=self._gateway.ready))
        for number, is_ready in enumerate(self._gateway.replicas):
            replica = status.scheduler.replicas.add(replica_id=number, ready=is_ready)
            replica.workers.add(message="" if is_ready else "no worker answers")
        return status


@dataclass
class FakeGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Start it on a loop, or with `in_thread()`.

    Attributes:
        ready, replicas: whether it takes requests, and whether each replica behind it does.
        memory: what is known of requests; share it among gateways of one system.
        failures: each fails one call, before anything is answered.
        cuts: each breaks one stream.
        failing: these sequences end with `sequence_error`; where all of a request do, so does its call.
        hold_after: stops a stream after so many events, until it is cancelled.
        tokens_per_delta: how many tokens come at once.
        specs: what was asked for.
        resumes: what was asked for again.
        has_chat_template: whether the model says that it has one.
        tenants, keys, traceparents: of each call that begins an answer or reads one; "" for none.
        cancelled: request ids of those that were cancelled while they ran, or were left by the reader they ended with.
        saw_cancel: set with each of them.
        http_answers: raw answers of the HTTP side, one for each connection; None: cut the connection.
        http_bodies: what was posted.
        http_heads: the lines above it.
        gate, credentials: who may call over gRPC, and with what TLS.
    """

    ready: bool = True
    replicas: tuple[bool, ...] = (True,)
    has_chat_template: bool = False
    memory: Memory = field(default_factory=Memory)
    failures: deque[BlockyardError] = field(default_factory=deque[BlockyardError])
    cuts: deque[Cut] = field(default_factory=deque[Cut])
    failing: frozenset[int] = frozenset()
    sequence_error: BlockyardError = field(default_factory=lambda: BlockyardError(Reason.NOT_FINITE, "not a number"))
    hold_after: int = -1
    tokens_per_delta: int = 1
    specs: list[Spec] = field(default_factory=list["Spec"])
    resumes: list[inference_pb2.ResumeGenerateRequest] = field(
        default_factory=list[inference_pb2.ResumeGenerateRequest]
    )
    tenants: list[str] = field(default_factory=list[str])
    keys: list[str] = field(default_factory=list[str])
    traceparents: list[str] = field(default_factory=list[str])
    cancelled: list[str] = field(default_factory=list[str])
    saw_cancel: threading.Event = field(default_factory=threading.Event)
    http_answers: deque[bytes] = field(default_factory=deque[bytes])
    http_bodies: list[Any] = field(default_factory=list[Any])
    http_heads: list[str] = field(default_factory=list[str])
    gate: Gate | None = None
    credentials: grpc.ServerCredentials | None = None

    async def start(self, grpc_port: int = 0, local_address: str = "") -> None:
        """Listens on the loopback, and at a Unix socket if told to."""
        await self._start_grpc(grpc_port, local_address)
        self._http = await asyncio.start_server(self._serve_http, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._http.sockets[0].getsockname()[1]}"

    async def _start_grpc(self, port: int, local_address: str = "") -> None:
        self._server = make_server(PUBLIC_MESSAGE_BYTES, [], gate=self.gate)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Administration(self), self._server)
        add_health(self._server, lambda: self.ready, lambda: True)
        self._port = bind(self._server, f"127.0.0.1:{port}", self.credentials)
        self.target = f"127.0.0.1:{self._port}"
        if local_address:
            bind(self._server, local_address)
        await self._server.start()

    async def stop(self) -> None:
        """Ends everything."""
        self._http.close()
        await self._server.stop(0)

    async def __aenter__(self) -> FakeGateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @contextmanager
    def in_thread(self) -> Generator[FakeGateway]:
        """Runs it on a loop in a thread, for callers that have no loop."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end_tasks(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    async def _end_tasks(self) -> None:
        """Stops, and waits for its calls: gRPC's stop may return before the tasks of cancelled calls have ended."""
        await self.stop()
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _receive(self, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        self.tenants.append(str(metadata.get("x-blockyard-tenant", "")))
        self.keys.append(find_key({str(name): str(value) for name, value in metadata.items()}))
        self.traceparents.append(str(metadata.get("traceparent", "")))
        if self.failures:
            raise self.failures.popleft()

    async def Generate(self, request: Any, context: Any) -> inference_pb2.GenerateResponse:
        """Refuses: the client library reads streams only, since they can be resumed."""
        raise BlockyardError(Reason.FEATURE_DISABLED, "a fake gateway answers in streams")

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answers token by token, the sequences in turn."""
        self.specs.append(request.spec)
        self._receive(context)
        spec = request.spec
        spec.request_id = spec.request_id or f"made-{len(self.specs)}"
        self.memory.begin(spec)
        async for event in self._tell(spec, events(spec, (), self.tokens_per_delta), context):
            yield inference_pb2.StreamGenerateResponse(event=event)

    async def Chat(self, request: Any, context: Any) -> inference_pb2.ChatResponse:
        """Refuses, as Generate does."""
        raise BlockyardError(Reason.FEATURE_DISABLED, "a fake gateway answers in streams")

    async def StreamChat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answers the last message as if it were a prompt."""
        async for response in self.StreamGenerate(request, context):
            yield inference_pb2.StreamChatResponse(event=response.event)

    async def ResumeGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answers with what comes after the positions."""
        self.resumes.append(request)
        self._receive(context)
        spec = self.memory.find(request)
        rest = events(spec, request.positions, self.tokens_per_delta)
        async for event in self._tell(spec, rest, context):
            yield inference_pb2.ResumeGenerateResponse(event=event)

    async def _tell(self, spec: Spec, told: Iterable[Event], context: Any) -> AsyncIterator[Event]:
        cut = self.cuts.popleft() if self.cuts else Cut(-1)
        is_kept = spec.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP
        seq = 0
        for number, event in enumerate(told):
            if number == cut.num_events:
                if cut.how is How.END:
                    return
                if cut.how is How.GAP:
                    seq += 1
                else:
                    await self._break(cut.how, context)
            if number == self.hold_after:
                await self._hold(spec.request_id, is_kept=is_kept)
            event.seq = seq
            seq += 1
            if event.HasField("finished") and event.finished.index in self.failing:
                event.finished.reason = sampling_pb2.FINISH_REASON_ERROR
                event.finished.error.CopyFrom(to_status(self.sequence_error))
            yield event
        self.memory.end(spec.request_id)
        if self.failing.issuperset(range(spec.n or 1)):
            raise self.sequence_error

    async def _break(self, how: How | BlockyardError, context: Any) -> None:
        if how is How.DRAINING:
            raise BlockyardError(Reason.DRAINING, "in the midst", retry_after_seconds=0.01)
        if isinstance(how, BlockyardError):
            raise how
        if how in _PLAIN_CODE:
            await context.abort(_PLAIN_CODE[how], "in the midst")
        # Of its own: this handler is ended by it.
        self._dying = asyncio.create_task(self._die(comes_back=how is How.RESTART))
        await asyncio.Event().wait()

    async def _die(self, *, comes_back: bool) -> None:
        await self._server.stop(0)
        if comes_back:
            self.memory.forget()
            await self._start_grpc(self._port)

    async def _hold(self, request_id: str, *, is_kept: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            if not is_kept and self.memory.end(request_id):
                self._note_cancel(request_id)

    def _note_cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.saw_cancel.set()

    async def CancelGenerate(self, request: Any, context: Any) -> inference_pb2.CancelGenerateResponse:
        """Ends requests."""
        running = [request_id for request_id in request.request_ids if self.memory.end(request_id)]
        for request_id in running:
            self._note_cancel(request_id)
        return inference_pb2.CancelGenerateResponse(cancelled_request_ids=running)

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        """A word's id is its length; a special token 0 goes first."""
        special = [] if request.HasField("add_special_tokens") and not request.add_special_tokens else [0]
        text = request.text or " ".join(part.text for said in request.conversation.messages for part in said.content)
        return inference_pb2.TokenizeResponse(token_ids=[*special, *(len(word) for word in text.split())])

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        """An id is a word of so many x."""
        return inference_pb2.DetokenizeResponse(text=" ".join("x" * number for number in request.token_ids))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """One, or none while it is not ready."""
        if self.failures:
            raise self.failures.popleft()
        model = inference_pb2.Model(
            name=MODEL,
            max_model_len=64,
            vocab_size=10,
            determinism_id="d",
            batch_invariant=True,
            has_chat_template=self.has_chat_template,
        )
        return inference_pb2.ListModelsResponse(models=[model] if self.ready else [])

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        body = json.loads(await reader.readexactly(length)) if length else None
        self.http_heads.append(head)
        if body is not None:
            self.http_bodies.append(body)
        if self.http_answers:
            writer.write(self.http_answers.popleft())
        elif body is None:
            writer.write(http_answer(json.dumps({"data": [{"id": MODEL}]}).encode()))
        else:
            writer.write(sse_answer(_openai_chunks(body)))
        await writer.drain()
        writer.close()


def http_answer(content: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer with its length."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def sse_answer(events: list[Any], *, done: bool = True, piece_bytes: int = 7) -> bytes:
    """Server-sent events in chunks that cut lines and characters anywhere."""
    lines = [*(json.dumps(event, ensure_ascii=False) for event in events), *(["[DONE]"] if done else [])]
    content = "".join(f": comment\ndata: {line}\n\n" for line in lines).encode()
    pieces = [content[at : at + piece_bytes] for at in range(0, len(content), piece_bytes)]
    chunks = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in [*pieces, b""])
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


def _openai_chunks(body: dict[str, Any]) -> list[Any]:
    chat = "messages" in body
    prompt = body["messages"][-1]["content"] if chat else body["prompt"]
    words = prompt.split()[: body.get("max_tokens") or DEFAULT_MAX_TOKENS]
    texts = [word + " " for word in words]
    choices = [{"delta": {"content": text}} if chat else {"text": text} for text in texts]
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words)}
    return [*({"choices": [choice]} for choice in choices), {"choices": [], "usage": usage}]
