"""Answers InferenceService on the core, and does nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from blockyard.errors import Violation, invalid
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from gateway import codec
from gateway.request import Accepted, Delta, Finished, PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.message import Message

    from gateway.generation import Generation, GenerationService

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The public API."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def _start(self, spec: inference_pb2.GenerationSpec, context: Any) -> Generation:
        generation = await self._generation.start(codec.decode_spec(spec))
        # At once when the client is gone, whatever the handler is doing.
        context.add_done_callback(lambda _: generation.close())
        return generation

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> inference_pb2.GenerateResponse:
        """Generates the whole answer at once."""
        generation = await self._start(request.spec, context)
        response = inference_pb2.GenerateResponse()
        deltas: dict[int, list[Delta]] = {}
        choices: list[inference_pb2.Choice] = []
        try:
            async for event in generation:
                if isinstance(event, Accepted):
                    response.accepted.CopyFrom(codec.encode_accepted(event))
                elif isinstance(event, Delta):
                    deltas.setdefault(event.index, []).append(event)
                elif isinstance(event, PromptLogprobs):
                    response.prompt_logprobs.CopyFrom(codec.encode_prompt_logprobs(event))
                elif isinstance(event, Finished):
                    choices.append(codec.encode_choice(deltas.get(event.index, ()), event))
        finally:
            generation.close()
        response.choices.extend(sorted(choices, key=lambda choice: choice.index))
        return response

    async def StreamGenerate(  # type: ignore[override]
        self, request: inference_pb2.StreamGenerateRequest, context: Any
    ) -> None:
        """Generates as a stream of events. It writes them by itself, so that a call that ends ends it in its write."""
        generation = await self._start(request.spec, context)
        seq = 0
        try:
            async for event in generation:
                await context.write(inference_pb2.StreamGenerateResponse(event=codec.encode_event(event, seq)))
                seq += 1
        finally:
            generation.close()

    async def CancelGenerate(  # type: ignore[override]
        self, request: inference_pb2.CancelGenerateRequest, context: Any
    ) -> inference_pb2.CancelGenerateResponse:
        """Cancels requests."""
        return inference_pb2.CancelGenerateResponse(cancelled_request_ids=self._generation.cancel(request.request_ids))

    async def Tokenize(  # type: ignore[override]
        self, request: inference_pb2.TokenizeRequest, context: Any
    ) -> inference_pb2.TokenizeResponse:
        """Turns text into token ids."""
        self._generation.resolve_model(request.model)
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._generation.encode(request.text, add_special_tokens=add)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(  # type: ignore[override]
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        self._generation.resolve_model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return inference_pb2.DetokenizeResponse(text=self._generation.tokenizer.decode(request.token_ids[:], skip))

    async def ListModels(  # type: ignore[override]
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """Lists the models that are served."""
        return inference_pb2.ListModelsResponse(models=map(codec.encode_model, self._generation.models()))


def add_inference_service(server: grpc.aio.Server, servicer: InferenceServicer) -> None:
    """Registers the service so that a request which is no message (a string that is not UTF-8) is FIELD_INVALID.

    What grpc itself answers to that is INTERNAL, as if the fault were the server's.
    """
    handlers = {method.name: _handler(method, servicer) for method in SERVICE.methods}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))


def _handler(method: Any, servicer: InferenceServicer) -> grpc.RpcMethodHandler[Any, Any]:
    request_type: type[Message] = getattr(inference_pb2, method.input_type.name)
    response_type: type[Message] = getattr(inference_pb2, method.output_type.name)
    answer = getattr(servicer, method.name)
    make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
    return make(_readable(answer), _reader(request_type), response_type.SerializeToString)


def _reader(request_type: type[Message]) -> Callable[[bytes], Message | DecodeError]:
    def read(content: bytes) -> Message | DecodeError:
        try:
            return request_type.FromString(content)
        except DecodeError as error:
            return error

    return read


def _readable(answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer_if_readable(request: Any, context: Any) -> Any:
        if isinstance(request, DecodeError):
            raise invalid([Violation("", "the request cannot be read: is every string UTF-8?")])
        return await answer(request, context)

    return answer_if_readable
