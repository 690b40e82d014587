"""Streams that begin while their model is still being loaded: comments say how far that is, until the answer begins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import Response

from gateway.fronts.http_calls.errors import client_error
from gateway.fronts.http_calls.streaming import STREAM_HEADERS, EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable

    from starlette.types import Message, Scope, Send

    from blockyard.errors import BlockyardError
    from gateway.fronts.http_calls.streaming import ServerSentEvent
    from gateway.generation import GenerationService

    Fail = Callable[[BlockyardError], Iterable[ServerSentEvent]]


async def answer_stream(
    generation: GenerationService, model: str, answering: Coroutine[Any, Any, Response], fail: Fail
) -> Response:
    """Returns the answer of a call that wants a stream; raises the errors that keep it from beginning.

    If the model is still being loaded after a second, the stream begins with comments; errors are events of it then.

    Args:
        generation: the core.
        model: the model's name in the call.
        answering: makes the answer.
        fail: makes the events of an error.
    """
    if not generation.is_loading(model):
        return await answering
    answer = asyncio.create_task(answering)
    comments = generation.loading(model, answer)
    try:
        first = await anext(comments, None)
    except BaseException:
        answer.cancel()
        raise
    return await answer if first is None else _LoadingStream(first, comments, answer, fail)


class _LoadingStream(Response):
    media_type = EventStream.media_type

    def __init__(self, first: str, comments: AsyncGenerator[str], answer: asyncio.Task[Response], fail: Fail) -> None:
        super().__init__(headers=STREAM_HEADERS)
        # A stream has no content length.
        del self.headers["content-length"]
        self._first = first
        self._comments = comments
        self._answer = answer
        self._fail = fail

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await _send_comment(send, self._first)
            async for comment in self._comments:
                await _send_comment(send, comment)
            answer = await self._answer
        except Exception as error:  # noqa: BLE001 - the boundary of what fails after the status line
            events = b"".join(event.encode() for event in self._fail(client_error(error)))
            await send({"type": "http.response.body", "body": events, "more_body": False})
        else:
            await answer(scope, receive, _without_start(send))
        finally:
            self._answer.cancel()


async def _send_comment(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})


def _without_start(send: Send) -> Send:
    """Returns a `send` for the rest of an answer that has begun."""

    async def send_rest(message: Message) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return send_rest
