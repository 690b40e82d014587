"""Answers the Open Inference Protocol with the gateway's core."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from blockyard.telemetry import EventLogger
from gateway.fronts.grpc_api.handlers import add_service, tenant_of
from gateway.fronts.open_inference.answer import started
from gateway.fronts.open_inference.call import INPUTS, OUTPUTS, InferCall, is_version, understand
from gateway.fronts.open_inference.codec import decode_request, encode_response
from gateway.fronts.open_inference.metadata import model_metadata, server_metadata
from gateway.fronts.openai.schema.requests import MAX_PROMPTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gateway.generation import GenerationService

log = EventLogger(__name__)
SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
# The most concurrent requests of one stream. The next request is read when one of them has ended.
MAX_REQUESTS_OF_STREAM = 1024
# A stream with this metadata, which is Triton's, ends at the first failed request, with its status.
STATUS_KEY, STATUS_VALUE = "triton_grpc_error", "true"


class OpenInferenceServicer:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def ServerLive(self, request: messages.ServerLiveRequest, context: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: messages.ServerReadyRequest, context: Any) -> Any:
        return messages.ServerReadyResponse(ready=self._generation.is_ready())

    async def ModelReady(self, request: messages.ModelReadyRequest, context: Any) -> Any:
        """Returns whether requests for a model would be served now."""
        generation, name = self._generation, request.name
        is_served = generation.serves(name) and is_version(request.version)
        return messages.ModelReadyResponse(ready=is_served and generation.is_ready(generation.model_of(name)))

    async def ServerMetadata(self, request: messages.ServerMetadataRequest, context: Any) -> Any:
        return messages.ServerMetadataResponse(**server_metadata("parameters"))

    async def ModelMetadata(self, request: messages.ModelMetadataRequest, context: Any) -> Any:
        return messages.ModelMetadataResponse(**model_metadata(self._generation, request.name, request.version))

    async def ModelInfer(self, request: messages.ModelInferRequest, context: Any) -> Any:
        call = self._understand(request, context)
        if call.stream:
            raise invalid([Violation("stream", "must be false for ModelInfer; ModelStreamInfer streams")])
        async with started(self._generation, call) as responses:
            return encode_response(await anext(responses))

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[messages.ModelInferRequest | BlockyardError], context: Any
    ) -> Any:
        """Answers requests concurrently, until the client has sent all and all are answered."""
        places = asyncio.Semaphore(MAX_REQUESTS_OF_STREAM)
        stream = _Stream(context, self._generation.metrics.on_grpc_error)
        try:
            async with asyncio.TaskGroup() as group:
                async for request in request_iterator:
                    await places.acquire()
                    task = group.create_task(self._answer(request, stream))
                    task.add_done_callback(lambda _: places.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, request: messages.ModelInferRequest | BlockyardError, stream: _Stream) -> None:
        name = ""
        try:
            if isinstance(request, BlockyardError):
                raise request
            name = request.id
            async with started(self._generation, self._understand(request, stream.context)) as responses:
                async for response in responses:
                    written = messages.ModelStreamInferResponse(infer_response=encode_response(response))
                    await stream.write(written)
        except Exception as error:  # noqa: BLE001 - the boundary of a request among others
            await stream.fail(name, error)

    def _understand(self, request: messages.ModelInferRequest, context: Any) -> InferCall:
        decoded = decode_request(request, INPUTS, max_elements=MAX_PROMPTS, max_outputs=len(OUTPUTS))
        call = understand(decoded)
        return call.of_caller(tenant_of(context), context.time_remaining())


class _Stream:
    """Writes the responses of a stream's concurrent requests, one at a time."""

    def __init__(self, context: Any, on_error: Callable[[Reason], None]) -> None:
        self.context = context
        self._on_error = on_error
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self._ends_at_failure = metadata.get(STATUS_KEY) == STATUS_VALUE
        self._turn = asyncio.Lock()

    async def write(self, response: messages.ModelStreamInferResponse) -> None:
        """Writes a response after the writes that are under way."""
        # Writing to a call that has ended fails: ignore it, since gRPC is about to cancel the handler.
        async with self._turn:
            with suppress(grpc.aio.InternalError):
                await self.context.write(response)

    async def fail(self, name: str, error: Exception) -> None:
        """Writes the error of the request `name`, or raises it to end the stream if the client asked for that."""
        if not isinstance(error, BlockyardError):
            log.exception("a request of a stream failed", request_id=name)
            error = BlockyardError(Reason.BUG, "internal error; the server's log has more")
        if self._ends_at_failure:
            raise error
        self._on_error(error.reason)
        response = messages.ModelStreamInferResponse(error_message=str(error))
        response.infer_response.id = name
        await self.write(response)


def add_open_inference_service(server: grpc.aio.Server, servicer: OpenInferenceServicer) -> None:
    add_service(server, SERVICE, servicer)
