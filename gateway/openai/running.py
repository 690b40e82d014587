"""The requests of one call while they run: started together, read as one, ended together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError
from gateway.openai import errors
from gateway.openai.call import Call, tokenized
from gateway.request import Accepted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from gateway.generation import GenerationService
    from gateway.reader import Reader
    from gateway.request import Event, GenerationRequest

Numbered = tuple[int, "Event"]


class Running:
    """A call's generations. Whoever makes it calls `aclose`, started or not."""

    def __init__(self, service: GenerationService, call: Call) -> None:
        self._service = service
        self._generations: list[Reader] = []
        self.call = call
        self.accepted: list[Accepted] = []

    async def start(self) -> None:
        """Starts every request of the call and waits until all are queued; raises the first BlockyardError of any."""
        self.call = await tokenized(self.call, self._service)
        try:
            for request in self.call.requests:
                self._generations.append(await self._start_one(request))
            for generation in self._generations:
                self.accepted.append(await _accepted(generation))
        except BlockyardError as error:
            raise errors.rename(error, self.call.names) from None

    async def _start_one(self, request: GenerationRequest) -> Reader:
        try:
            return await self._service.start(request)
        except BlockyardError as error:
            fields = {violation.field for violation in error.violations}
            if not (self.call.default_length and fields == {"stop.max_tokens"}):
                raise
        # The default does not fit: what is left of the model's length is shorter.
        return await self._service.start(replace(request, stop=replace(request.stop, max_tokens=None)))

    async def events(self) -> AsyncGenerator[Numbered, None]:
        """Reads the events of all requests as they come, each with its request's number."""
        if len(self._generations) == 1:
            async for event in self._generations[0]:
                yield 0, event
            return
        # One place for each: a slow client is felt by the core, which then merges deltas.
        queue: asyncio.Queue[Numbered | BlockyardError | None] = asyncio.Queue(len(self._generations))
        readers = [
            asyncio.create_task(_read(number, generation, queue)) for number, generation in enumerate(self._generations)
        ]
        try:
            for _ in readers:
                while (item := await queue.get()) is not None:
                    if isinstance(item, BlockyardError):
                        raise item
                    yield item
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def aclose(self) -> None:
        """Ends what still runs."""
        for generation in self._generations:
            await generation.aclose()


async def _accepted(generation: Reader) -> Accepted:
    event = await anext(generation)
    assert isinstance(event, Accepted), f"{generation.request_id} began with {event}"
    return event


async def _read(number: int, generation: Reader, queue: asyncio.Queue[Numbered | BlockyardError | None]) -> None:
    try:
        async for event in generation:
            await queue.put((number, event))
        await queue.put(None)
    except BlockyardError as error:
        await queue.put(error)
