"""Starts or resumes all requests of one call, merges their events, and closes them together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.contract.events import Accepted, Event
from blockyard.errors import BlockyardError, Reason, is_unknown_request
from blockyard.service.roots import start_task
from gateway.call_context import name_request
from gateway.fronts.openai import errors
from gateway.fronts.openai.call_codec import decode_state
from gateway.fronts.openai.call_spec import CallSpec, with_token_ids
from gateway.fronts.openai.call_state import make_call
from gateway.fronts.openai.event_ids import StreamPosition
from gateway.request import GenerationRequest, ResumeRequest

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncGenerator, Mapping

    from blockyard.contract.request import Position
    from gateway.generation import GenerationService
    from gateway.live.reader import Reader

Numbered = tuple[int, "Event"]
_NOTHING = StreamPosition()


class CallReaders:
    """Owns the readers of a call's requests. Its creator calls `start` or `resume` once, and always `aclose`.

    Attributes:
        call: the call from the body, or restored from its requests.
        accepted: the first event of each request.
        created: the call's first arrival, in seconds since 1970.
    """

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._readers: list[Reader] = []
        self.call: CallSpec
        self.accepted: list[Accepted] = []
        self.created = 0

    async def start(self, call: CallSpec, known: StreamPosition = _NOTHING) -> None:
        """Starts every request of a call and waits until all are queued. A request that was sent before is read again.

        `known`: the client's position. Events before it are yielded too. Raises the first BlockyardError of a request.
        """
        name_request(call.call_id)
        self.call = await with_token_ids(call, self._service)
        try:
            for number, request in enumerate(self.call.requests):
                self._readers.append(await self._start_one(request, known.positions_of(number, call.n)))
            await self._begin()
        except BlockyardError as error:
            raise errors.rename(error, call.names) from None

    async def _start_one(self, request: GenerationRequest, positions: Mapping[int, Position]) -> Reader:
        try:
            return await self._service.start(request, positions, replay=True)
        except BlockyardError as error:
            fields = {violation.field for violation in error.violations}
            if not (self.call.default_length and fields == {"stop.max_tokens"}):
                raise
        # The default length exceeds the room that the prompt leaves: generate up to the model's length instead.
        request = replace(request, stop=replace(request.stop, max_tokens=None))
        return await self._service.start(request, positions, replay=True)

    async def resume(self, call_id: str, tenant: str, known: StreamPosition) -> None:
        """Reads a call again, which may have run at another gateway.

        `known`: the client's position. Events before it are yielded too. Raises BlockyardError REQUEST_EXPIRED if a
        request of the call is no longer known.
        """
        first = await self._find_first(call_id, tenant)
        state = decode_state(first.front_state, first.request_id)
        names = [first.request_id]
        if state.num_requests > 1:
            names = [f"{call_id}-{number}" for number in range(state.num_requests)]
        for number, name in enumerate(names):
            resume = ResumeRequest(name, tenant, known.positions_of(number, first.n))
            try:
                self._readers.append(await self._service.resume(resume, replay=True))
            except BlockyardError as error:
                raise errors.rename(error, {}) from None
        requests = [reader.request for reader in self._readers]
        self.call = make_call(state, requests, await self._service.find_tokenizer(first.model))
        await self._begin()

    async def _find_first(self, call_id: str, tenant: str) -> GenerationRequest:
        try:
            found = await self._service.find(call_id, tenant)
        except BlockyardError as error:
            if not is_unknown_request(error):
                raise
            try:
                found = await self._service.find(f"{call_id}-0", tenant)
            except BlockyardError as of_several:
                # The first error names the call by the client's id.
                raise (error if is_unknown_request(of_several) else of_several) from None
        if decode_state(found.front_state, found.request_id).call_id != call_id:
            raise BlockyardError(Reason.REQUEST_EXPIRED, f"{call_id!r} belongs to another call")
        return found

    async def _begin(self) -> None:
        for reader in self._readers:
            event = await anext(reader)
            assert isinstance(event, Accepted), f"{reader.request_id} began with {event}"
            self.accepted.append(event)
        first = self._readers[0]
        self.created = decode_state(first.front_state, first.request_id).created

    def be_patient(self) -> None:
        """Makes the readers wait for the end of the answer instead of waking for each token."""
        for reader in self._readers:
            reader.be_patient()

    def find_token_ids(self, number: int, index: int) -> array[int]:
        """Returns all token ids so far of a sequence of the request `number`."""
        return self._readers[number].find_token_ids(index)

    async def events(self) -> AsyncGenerator[Numbered, None]:
        """Yields the events of all requests as they come, each with its request's number.

        Raises the BlockyardError that ends a request. If only the sequences of a request failed, the other requests
        continue; such an error is raised at the end if all requests failed in this way.
        """
        if len(self._readers) == 1:
            async for event in self._readers[0]:
                yield 0, event
            return
        # Keep the queue short: a slow client then makes the readers wait, and the core merges their deltas.
        queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(len(self._readers))
        tasks = [start_task(_read(number, reader, queue), "prompt") for number, reader in enumerate(self._readers)]
        try:
            for _ in tasks:
                while (item := await queue.get()) is not None:
                    if isinstance(item, Exception):
                        raise item
                    yield item
            if failure := self._failure():
                raise failure
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _failure(self) -> BlockyardError | None:
        failures = [reader.failure for reader in self._readers]
        return failures[0] if all(failures) else None

    async def aclose(self) -> None:
        """Closes all readers. Requests without readers end, unless their `on_disconnect` keeps them."""
        for reader in self._readers:
            await reader.aclose()


async def _read(number: int, reader: Reader, queue: asyncio.Queue[Numbered | Exception | None]) -> None:
    end: Exception | None = None
    try:
        async for event in reader:
            await queue.put((number, event))
    except Exception as error:  # noqa: BLE001 - it is raised where the queue is read, which would wait for ever
        end = None if error is reader.failure else error
    await queue.put(end)
