"""Serves the Responses API. Owns the order of a call: read the body, start the request, answer."""

from __future__ import annotations

import functools
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http_calls.bodies import parse_body, read_json, read_tenant
from gateway.fronts.http_calls.loading import answer_stream
from gateway.fronts.http_calls.openapi import EVENTS, JSON, TENANT, ApiBodies, call_id, documented
from gateway.fronts.http_calls.single_reader import read_all, resumed, started, typed, typed_events
from gateway.fronts.http_calls.streaming import Connection, EventStream, ServerSentEvent, encode_json
from gateway.fronts.openai.tokenization import TokenForm
from gateway.fronts.responses.answer import FROM_THE_BEGINNING, ResponseAnswer
from gateway.fronts.responses.call import call_of, naming_body_places, rename, understand, understand_count
from gateway.fronts.responses.schema import InputTokensBody, ResponseBody, TokenizeInputBody
from gateway.observe.metrics import note_error
from gateway.request import ResumeRequest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator

    from blockyard.contract.events import Accepted
    from gateway.fronts.responses.call import ResponseCall
    from gateway.generation import GenerationService
    from gateway.live.reader import Reader


_PAGES = "https://platform.openai.com/docs/api-reference"

_RESPONSE = f"OpenAI's [response]({_PAGES}/responses/object)"

_STREAMED = f"{_RESPONSE}, or its [events]({_PAGES}/responses-streaming); an event's name is the type in its data"

_RESPONSE_ID = call_id("response_id", "the id of a response in the background")

_streamed = functools.partial(documented, _STREAMED, Reason, forms=(JSON, EVENTS))

BODIES = ApiBodies(
    (ResponseBody, InputTokensBody, TokenizeInputBody), {ResponseBody: {"max_tokens": "max_output_tokens"}}
)

CREATE = _streamed(bodies=(ResponseBody,), parameters=(TENANT,))

COUNT_TOKENS = documented(
    f"OpenAI's [count of tokens]({_PAGES}/responses/input-tokens)",
    Reason,
    bodies=(InputTokensBody,),
    parameters=(TENANT,),
)

RETRIEVE = _streamed(parameters=(_RESPONSE_ID, TENANT))

CANCEL = documented(_RESPONSE, Reason, parameters=(_RESPONSE_ID, TENANT))

PATH = "/v1/responses"

_COUNT_PATH = f"{PATH}/input_tokens"


class ResponseEndpoints:
    """Serves responses. Background responses can be read again and cancelled while they run.

    After its end, a background response can be read within the gateway's resume window; it is not stored longer.
    """

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def create(self, request: Request) -> Response:
        """Answers an input: OpenAI's responses."""
        tenant = read_tenant(request)
        body = parse_body(ResponseBody, await read_json(request))
        self._generation.resolve_model(body.model or "")
        clock = self._generation.clock
        answering = self._answer(request, body, understand(body, tenant, int(clock.time()), clock))
        if not body.stream:
            return await answering
        return await answer_stream(self._generation, body.model or "", answering, _fail)

    async def _answer(self, request: Request, body: ResponseBody, call: ResponseCall) -> Response:
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            starting = resources.enter_async_context(started(self._generation, call.request))
            with _naming(body):
                reader, accepted = await connection.run(starting)
            answer = await self._make_answer(call, accepted)
            headers = {"x-request-id": accepted.request_id}
            if call.stream:
                return EventStream(_stream(answer, reader), connection, resources.pop_all(), headers)
            if not call.background:
                await connection.run(read_all(answer, reader))
            return Response(encode_json(answer.response()), headers=headers, media_type="application/json")

    async def count_tokens(self, request: Request) -> JSONResponse:
        """Counts the tokens of an input's prompt."""
        tenant = read_tenant(request)
        body = parse_body(InputTokensBody, await read_json(request))
        self._generation.resolve_model(body.model or "")
        with _naming(body):
            token_ids = await self._generation.prompt_of(understand_count(body, tenant))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def retrieve(
        self, request: Request, response_id: str, stream: bool = False, starting_after: int = FROM_THE_BEGINNING
    ) -> Response:
        """Returns the present state of a background response, or streams its events after `starting_after`."""
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            resuming = resources.enter_async_context(
                resumed(self._generation, ResumeRequest(response_id, read_tenant(request)))
            )
            reader, accepted = await connection.run(resuming)
            answer = await self._make_answer(call_of(reader.request), accepted, starting_after)
            if stream:
                return EventStream(_stream(answer, reader), connection, resources.pop_all(), {})
            if reader.has_ended:
                await _read_to_its_end(answer, reader)
            return Response(encode_json(answer.response()), media_type="application/json")

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancels a background response, which may run at another gateway, and returns it."""
        tenant = read_tenant(request)
        async with resumed(self._generation, ResumeRequest(response_id, tenant)) as (reader, accepted):
            answer = await self._make_answer(call_of(reader.request), accepted)
            await self._generation.cancel([response_id], tenant=tenant)
            await _read_to_its_end(answer, reader)
            return Response(encode_json(answer.response()), media_type="application/json")

    async def _make_answer(
        self, call: ResponseCall, accepted: Accepted, starting_after: int = FROM_THE_BEGINNING
    ) -> ResponseAnswer:
        count = await self._generation.token_counter(call.request.model)
        return ResponseAnswer(call, accepted, count, starting_after)


@contextmanager
def _naming(body: ResponseBody | InputTokensBody) -> Generator[None]:
    """Renames the fields in an error of the core to the parameters and places of a body."""
    try:
        with naming_body_places(body):
            yield
    except BlockyardError as error:
        raise rename(error) from None


# Calls of /tokenize with a body of this API.
INPUT_FORM = TokenForm("input", TokenizeInputBody, lambda body: understand_count(body, ""), _naming)


def _fail(error: BlockyardError) -> list[ServerSentEvent]:
    """Makes the event of an error in a stream that has no response yet."""
    note_error(error.reason)
    return [typed({"type": "error", "code": str(error.reason), "message": error.message, "param": None})]


def _stream(answer: ResponseAnswer, reader: Reader) -> AsyncGenerator[ServerSentEvent, None]:
    """Makes the events of a stream. The last event has the status of the response."""

    def fail(error: BlockyardError) -> Iterator[dict[str, Any]]:
        note_error(error.reason)
        return answer.fail(error)

    return typed_events(answer, reader, fail)


async def _read_to_its_end(answer: ResponseAnswer, reader: Reader) -> None:
    """Reads an answer to its end. A failure becomes a part of the answer."""
    try:
        await read_all(answer, reader)
    except BlockyardError as error:
        for _ in answer.fail(error):
            pass


async def _not_served(request: Request) -> Response:
    """Refuses the API's unsupported calls; the error names the call."""
    message = f"{request.method} {request.url.path} is not supported, since answers are not stored"
    raise BlockyardError(Reason.UNSUPPORTED_PARAMETER, message)


def _allow(method: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Makes a route that refuses a path's unsupported methods. `method`: the method that the path supports."""

    async def refuse() -> Response:
        raise HTTPException(405, "Not supported, since answers are not stored", {"Allow": method})

    return refuse


def add_responses(app: FastAPI, generation: GenerationService) -> None:
    """Adds the API's routes to an application, whose error boundary answers their errors."""
    endpoints = ResponseEndpoints(generation)
    of_one = PATH + "/{response_id}"
    app.add_api_route(PATH, endpoints.create, methods=["POST"], **CREATE)
    app.add_api_route(_COUNT_PATH, endpoints.count_tokens, methods=["POST"], **COUNT_TOKENS)
    app.add_api_route(_COUNT_PATH, _allow("POST"), methods=["GET", "DELETE"], include_in_schema=False)
    app.add_api_route(of_one, endpoints.retrieve, methods=["GET"], **RETRIEVE)
    app.add_api_route(of_one + "/cancel", endpoints.cancel, methods=["POST"], **CANCEL)
    app.add_api_route(of_one, _allow("GET"), methods=["POST", "DELETE"], include_in_schema=False)
    app.add_api_route(of_one + "/cancel", _allow("POST"), methods=["GET", "DELETE"], include_in_schema=False)
    app.add_api_route(PATH + "/{rest:path}", _not_served, methods=["GET", "POST", "DELETE"], include_in_schema=False)
