"""Starts, resumes and reads a call that consists of one request."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from blockyard.contract.events import Accepted, Event
from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.errors import client_error
from gateway.fronts.http_calls.streaming import ServerSentEvent, encode_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

    from gateway.generation import GenerationService
    from gateway.live.reader import Reader
    from gateway.request import GenerationRequest, ResumeRequest


class Answer(Protocol):
    """Makes the events of a stream. An event is an object; its field `type` is also the name of the event."""

    def start(self) -> Iterable[dict[str, Any]]:
        """Makes the events that precede the reader's events."""
        ...

    def add(self, event: Event) -> Iterable[dict[str, Any]]:
        """Takes a reader's event, and makes the stream's events for it while the result is iterated."""
        ...


@asynccontextmanager
async def started(
    service: GenerationService, request: GenerationRequest, *, clamps: bool = False
) -> AsyncGenerator[tuple[Reader, Accepted], None]:
    """Starts a request, waits until it is queued, and closes its reader at the end.

    `clamps`: whether to reduce a max_tokens that exceeds the room after the prompt. Raises BlockyardError.
    """
    try:
        reader = await service.start(request, replay=True)
    except BlockyardError as error:
        if not (clamps and {violation.field for violation in error.violations} == {"stop.max_tokens"}):
            raise
        unlimited = replace(request, stop=replace(request.stop, max_tokens=None))
        reader = await service.start(unlimited, replay=True)
    async with _begun(reader) as begun:
        yield begun


@asynccontextmanager
async def resumed(service: GenerationService, resume: ResumeRequest) -> AsyncGenerator[tuple[Reader, Accepted], None]:
    """Reads a request again from its beginning, at whichever gateway it ran, and closes its reader at the end.

    Raises BlockyardError REQUEST_EXPIRED.
    """
    async with _begun(await service.resume(resume, replay=True)) as begun:
        yield begun


@asynccontextmanager
async def _begun(reader: Reader) -> AsyncGenerator[tuple[Reader, Accepted], None]:
    try:
        event = await anext(reader)
        assert isinstance(event, Accepted), f"{reader.request_id} began with {event}"
        yield reader, event
    finally:
        await reader.aclose()


async def read_all(answer: Answer, reader: Reader) -> None:
    """Reads an answer to its end without streaming it."""
    reader.be_patient()
    async for event in reader:
        for _ in answer.add(event):
            pass


async def typed_events(
    answer: Answer, reader: Reader, fail: Callable[[BlockyardError], Iterable[dict[str, Any]]]
) -> AsyncGenerator[ServerSentEvent, None]:
    """Makes the events of a stream. If the answer fails, the stream ends with the events of `fail`."""
    try:
        for event in answer.start():
            yield typed(event)
        async for item in reader:
            for event in answer.add(item):
                yield typed(event)
    except Exception as error:  # noqa: BLE001 - the boundary of what fails after the status line
        for event in fail(client_error(error)):
            yield typed(event)


def typed(event: dict[str, Any]) -> ServerSentEvent:
    """Makes the event of a stream that is named after its type."""
    return ServerSentEvent(encode_json(event), event=event["type"])
