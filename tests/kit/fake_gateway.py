"""A gateway without a scheduler, on real sockets: it answers with the prompt's own words, and fails as it is told to.

The words of an answer are those of the prompt, again and again up to max_tokens (8 unless asked); a word is a token,
and its id is the word's length, so a prompt of token ids [3, 1] stands for the words "xxx" and "x".
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.rpc import PUBLIC_MESSAGE_BYTES, add_health, bind, make_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MODEL = "fake"
DEFAULT_MAX_TOKENS = 8


@dataclass
class FakeGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Start it on a loop, or with `in_thread()`.

    Attributes:
        failures: each fails one call, before anything is answered.
        fails_after: fails a stream after so many events.
        hold_after: stops a stream after so many events, until it is cancelled.
        skips_seq: leaves this number out.
        ends_early: ends streams OK before anything has finished.
        specs: what was asked for.
        cancelled: request ids of streams that were cancelled while they were held.
        saw_cancel: set with each of them.
        http_answers: raw answers of the HTTP side, one for each connection; None: cut the connection.
        http_bodies: what was posted.
    """

    ready: bool = True
    failures: deque[BlockyardError] = field(default_factory=deque)
    fails_after: int = -1
    hold_after: int = -1
    skips_seq: int = -1
    ends_early: bool = False
    specs: list[inference_pb2.GenerationSpec] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    saw_cancel: threading.Event = field(default_factory=threading.Event)
    http_answers: deque[bytes] = field(default_factory=deque)
    http_bodies: list[Any] = field(default_factory=list)

    async def start(self, grpc_port: int = 0) -> None:
        """Listens on the loopback."""
        self._server = make_server(PUBLIC_MESSAGE_BYTES, [])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        add_health(self._server, lambda: self.ready, lambda: True)
        self.target = f"127.0.0.1:{bind(self._server, f'127.0.0.1:{grpc_port}')}"
        await self._server.start()
        self._http = await asyncio.start_server(self._serve_http, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._http.sockets[0].getsockname()[1]}"

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
    def in_thread(self) -> Iterator[FakeGateway]:
        """Runs it on a loop in a thread, for callers that have no loop."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), loop).result(10)
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self.stop(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    def _begin(self, spec: inference_pb2.GenerationSpec) -> inference_pb2.Accepted:
        self.specs.append(spec)
        if self.failures:
            raise self.failures.popleft()
        request_id = spec.request_id or f"made-{len(self.specs)}"
        return inference_pb2.Accepted(
            request_id=request_id, num_prompt_tokens=len(_words(spec)), seed=spec.sampling.seed or 7, model=MODEL
        )

    async def Generate(self, request: Any, context: Any) -> inference_pb2.GenerateResponse:
        """Answers at once."""
        accepted = self._begin(request.spec)
        choices = [
            inference_pb2.Choice(
                index=index,
                text=" ".join(_answer(request.spec)),
                token_ids=_token_ids(request.spec, _answer(request.spec)),
                finished=_finished(request.spec, index),
            )
            for index in range(request.spec.n or 1)
        ]
        return inference_pb2.GenerateResponse(accepted=accepted, choices=choices)

    async def StreamGenerate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answers word by word, the sequences in turn."""
        accepted = self._begin(request.spec)
        seq = 0
        for number, event in enumerate(_events(request.spec, accepted)):
            if number == self.fails_after:
                raise BlockyardError(Reason.DRAINING, "in the midst", retry_after_seconds=0.01)
            if number == self.hold_after:
                await self._hold(accepted.request_id)
            if self.ends_early and event.WhichOneof("event") == "finished":
                return
            seq += seq == self.skips_seq
            event.seq = seq
            seq += 1
            yield inference_pb2.StreamGenerateResponse(event=event)

    async def _hold(self, request_id: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.append(request_id)
            self.saw_cancel.set()

    async def CancelGenerate(self, request: Any, context: Any) -> inference_pb2.CancelGenerateResponse:
        """Says that all ids that begin with "run" were running."""
        running = [request_id for request_id in request.request_ids if request_id.startswith("run")]
        return inference_pb2.CancelGenerateResponse(cancelled_request_ids=running)

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        """A word's id is its length; a special token 0 goes first."""
        special = [] if request.HasField("add_special_tokens") and not request.add_special_tokens else [0]
        return inference_pb2.TokenizeResponse(token_ids=[*special, *(len(word) for word in request.text.split())])

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        """An id is a word of so many x."""
        return inference_pb2.DetokenizeResponse(text=" ".join("x" * number for number in request.token_ids))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        """One."""
        if self.failures:
            raise self.failures.popleft()
        model = inference_pb2.Model(
            name=MODEL, max_model_len=64, vocab_size=10, determinism_id="d", batch_invariant=True
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def _serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
        body = json.loads(await reader.readexactly(length)) if length else None
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


def _words(spec: inference_pb2.GenerationSpec) -> list[str]:
    if spec.WhichOneof("prompt") == "token_ids":
        return ["x" * number for number in spec.token_ids.ids]
    return spec.text.split()


def _answer(spec: inference_pb2.GenerationSpec) -> list[str]:
    words = _words(spec) or ["nothing"]
    num_tokens = spec.stop.max_tokens or DEFAULT_MAX_TOKENS
    return (words * num_tokens)[:num_tokens]


def _token_ids(spec: inference_pb2.GenerationSpec, words: list[str]) -> list[int]:
    return [len(word) for word in words] if spec.return_token_ids else []


def _finished(spec: inference_pb2.GenerationSpec, index: int) -> inference_pb2.Finished:
    stopped = spec.stop.stop_strings or spec.stop.stop_token_ids
    matched = inference_pb2.MatchedStop()
    if spec.stop.stop_strings:
        matched.stop_string = spec.stop.stop_strings[0]
    elif spec.stop.stop_token_ids:
        matched.stop_token_id = spec.stop.stop_token_ids[0]
    usage = sampling_pb2.Usage(
        num_prompt_tokens=len(_words(spec)), num_cached_tokens=1, num_completion_tokens=len(_answer(spec))
    )
    return inference_pb2.Finished(
        index=index,
        reason=sampling_pb2.FINISH_REASON_STOP if stopped else sampling_pb2.FINISH_REASON_LENGTH,
        matched_stop=matched,
        usage=usage,
        determinism_id="d",
    )


def _events(spec: inference_pb2.GenerationSpec, accepted: Any) -> Iterator[inference_pb2.GenerationEvent]:
    yield inference_pb2.GenerationEvent(accepted=accepted)
    indexes, num_text_bytes = range(spec.n or 1), 0
    for position, word in enumerate(_answer(spec)):
        text = word if position == 0 else " " + word
        num_text_bytes += len(text.encode())
        for index in indexes:
            yield inference_pb2.GenerationEvent(
                delta=inference_pb2.Delta(
                    index=index,
                    text=text,
                    token_ids=_token_ids(spec, [word]),
                    num_tokens=position + 1,
                    num_text_bytes=num_text_bytes,
                )
            )
    for index in indexes:
        yield inference_pb2.GenerationEvent(finished=_finished(spec, index))
