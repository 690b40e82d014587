"""Starts, resumes and cancels completions and chats over HTTP.

Owns the order of a call: read the body, turn it into requests, start them, answer.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from blockyard.contract.request import OnDisconnect
from blockyard.errors import BlockyardError, Violation, invalid
from gateway.fronts.http_calls.bodies import parse_body, read_json, read_key, read_tenant
from gateway.fronts.http_calls.errors import client_error
from gateway.fronts.http_calls.loading import answer_stream
from gateway.fronts.http_calls.streaming import Connection, EventStream, ServerSentEvent
from gateway.fronts.openai import errors
from gateway.fronts.openai.answer import ChunkedAnswer, WholeAnswer
from gateway.fronts.openai.call_codec import encode_state
from gateway.fronts.openai.call_readers import CallReaders
from gateway.fronts.openai.call_spec import CallSpec, understand_chat, understand_completion
from gateway.fronts.openai.call_state import make_state
from gateway.fronts.openai.event_ids import StreamPosition, StreamTracker, parse
from gateway.fronts.openai.schema.requests import MAX_PROMPTS, ChatBody, CompletionBody, GenerationBody
from gateway.request import check_request_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from blockyard.clock import Clock
    from gateway.generation import GenerationService

B = TypeVar("B", bound=GenerationBody)
_POSITION = "Last-Event-ID"


class CallEndpoints:
    """Serves completions and chats, and resumes and cancels them by name."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def complete(self, request: Request) -> Response:
        """Continues prompts: OpenAI's completions."""
        return await self._answer(request, CompletionBody, understand_completion)

    async def chat(self, request: Request) -> Response:
        """Answers a chat: OpenAI's chat completions."""
        return await self._answer(request, ChatBody, understand_chat)

    async def _answer(self, request: Request, kind: type[B], understand: Callable[[B, Clock], CallSpec]) -> Response:
        tenant, key, position = read_tenant(request), read_key(request), _read_position(request)
        body = _named(parse_body(kind, await read_json(request)), key)
        _check_position(position, body)
        self._generation.resolve_model(body.model or "")
        call = understand(body, self._generation.clock)
        keeps = key is not None and body.on_disconnect is None
        call = _with_state(call, tenant=tenant, keeps=keeps, created=int(self._generation.clock.time()))
        answering = self._run(request, lambda readers: readers.start(call, position), position)
        return await (answer_stream(self._generation, body.model or "", answering, _fail) if body.stream else answering)

    async def resume(self, request: Request, request_id: str) -> Response:
        """Streams the answer of a call again, beginning after the event that Last-Event-ID names."""
        tenant, position = read_tenant(request), _read_position(request)
        return await self._run(request, lambda readers: readers.resume(request_id, tenant, position), position)

    async def cancel(self, request: Request, request_id: str) -> Response:
        """Cancels all requests of a call, also if they run at another gateway."""
        check_request_id(request_id)
        tenant = read_tenant(request)
        cancelled, pending = await self._generation.cancel([request_id], tenant=tenant)
        if not cancelled:
            several = (f"{request_id}-{number}" for number in range(MAX_PROMPTS))
            cancelled, _ = await self._generation.cancel(several, tenant=tenant)
        fields = {"pending": True} if pending and not cancelled else {}
        return JSONResponse({"id": request_id, "cancelled": bool(cancelled), **fields})

    async def _run(
        self, request: Request, begin: Callable[[CallReaders], Coroutine[Any, Any, None]], position: StreamPosition
    ) -> Response:
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            readers = CallReaders(self._generation)
            resources.push_async_callback(readers.aclose)
            try:
                await connection.run(begin(readers))
            except BlockyardError as error:
                raise position.explain(error) from None
            headers = {"x-request-id": readers.call.call_id}
            if readers.call.stream:
                events = self._chunks(readers, StreamTracker(readers.call, position, readers.find_token_ids), position)
                return EventStream(events, connection, resources.pop_all(), headers)
            whole = await connection.run(self._whole(readers))
            return Response(whole, headers=headers, media_type="application/json")

    async def _whole(self, readers: CallReaders) -> bytes:
        readers.be_patient()
        count = await self._generation.token_counter(readers.accepted[0].model)
        answer = WholeAnswer(readers.call, readers.accepted, readers.created, count)
        async with aclosing(readers.events()) as events:
            async for prompt, event in events:
                answer.add(prompt, event)
        return answer.encode()

    async def _chunks(
        self, readers: CallReaders, tracker: StreamTracker, position: StreamPosition
    ) -> AsyncGenerator[ServerSentEvent, None]:
        """Makes the events of a stream. A stream that fails ends with an error event and without [DONE].

        Events that the client already has are added to the answer, which counts tokens, but are not sent again.
        """
        model = readers.accepted[0].model
        fingerprint = next((card.determinism_id for card in self._generation.models() if card.name == model), "")
        try:
            count = await self._generation.token_counter(model)
            answer = ChunkedAnswer(readers.call, readers.accepted, readers.created, fingerprint, count)
            if not position.has_begun:
                for chunk in answer.openings():
                    # These chunks have no id: a client cannot resume before the first token.
                    yield ServerSentEvent(chunk)
            async with aclosing(readers.events()) as events:
                async for prompt, event in events:
                    is_new, chunk = tracker.take(prompt, event), answer.add(prompt, event)
                    if is_new and chunk is not None:
                        yield ServerSentEvent(chunk, tracker.id())
        except Exception as error:  # noqa: BLE001 - the boundary of what fails after the status line
            for event in _fail(position.explain(client_error(error))):
                yield event
            return
        if not position.usage and (chunk := answer.usage()) is not None:
            yield ServerSentEvent(chunk, tracker.id(usage=True))
        yield ServerSentEvent("[DONE]")


def _fail(error: BlockyardError) -> list[ServerSentEvent]:
    return [ServerSentEvent(json.dumps({"error": errors.error_object(error)}))]


def _with_state(call: CallSpec, *, tenant: str, keeps: bool, created: int) -> CallSpec:
    """Adds the values to a call's requests that do not come from its body.

    Args:
        call: the call from the body.
        tenant: the call's tenant.
        keeps: whether the requests outlive the client's connection.
        created: the call's arrival, in seconds since 1970.
    """
    added: dict[str, Any] = {"tenant": tenant, "front_state": encode_state(make_state(call, created))}
    if keeps:
        added["on_disconnect"] = OnDisconnect.KEEP
    return replace(call, requests=tuple(replace(request, **added) for request in call.requests))


def _read_position(request: Request) -> StreamPosition:
    """Reads the position of a stream's client; raises BlockyardError FIELD_INVALID."""
    return parse(request.headers.get(_POSITION, ""))


def _check_position(position: StreamPosition, body: GenerationBody) -> None:
    """Raises BlockyardError FIELD_INVALID for a position in an answer that cannot be resumed."""
    if position.has_begun and body.request_id is None:
        raise invalid([Violation(_POSITION, "needs the header Idempotency-Key, which names the call")])
    if position.has_begun and not body.stream:
        raise invalid([Violation(_POSITION, 'is allowed only for streams: the body needs "stream": true')])


def _named(body: B, key: str | None) -> B:
    """Sets a body's request id to the Idempotency-Key, if there is one; raises BlockyardError if they differ."""
    if key is None:
        return body
    if body.request_id not in (None, key):
        raise invalid([Violation("request_id", f"must equal {key!r}, the value of the header Idempotency-Key")])
    return body.model_copy(update={"request_id": key})
