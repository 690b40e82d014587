"""Answers InferenceService with the gateway's core."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.contract.codec.events import encode_accepted, encode_event, encode_prompt_logprobs
from blockyard.contract.codec.models import MODEL
from blockyard.contract.codec.pooling import encode_classifications, encode_embeddings, encode_scores
from blockyard.contract.events import Accepted, Delta, Finished, Loading, PromptLogprobs
from blockyard.contract.request import OnDisconnect
from blockyard.inference.v1 import inference_pb2
from gateway.codec import public as codec
from gateway.fronts.grpc_api.handlers import add_service, tenant_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    import grpc.aio

    from blockyard.contract.events import Event
    from gateway.generation import GenerationService
    from gateway.live.reader import Reader
    from gateway.request import GenerationRequest, ResumeRequest

    StreamResponse = (
        inference_pb2.StreamGenerateResponse | inference_pb2.StreamChatResponse | inference_pb2.ResumeGenerateResponse
    )

W = TypeVar("W", inference_pb2.GenerateResponse, inference_pb2.ChatResponse)
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]


class InferenceServicer:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def _start(self, request: GenerationRequest, context: Any) -> Reader:
        request = replace(request, tenant=tenant_of(context))
        if request.on_disconnect is OnDisconnect.ABORT:
            request = replace(request, remaining_seconds=context.time_remaining())
        return _watched(await self._generation.start(request), context)

    async def _stream(self, request: GenerationRequest, context: Any, response: type[StreamResponse]) -> None:
        await self._write(self._start(request, context), request.model, context, response)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:
        reader = await self._start(codec.decode_generation(request.spec), context)
        return await _read_whole(reader, inference_pb2.GenerateResponse())

    async def StreamGenerate(self, request: inference_pb2.StreamGenerateRequest, context: Any) -> Any:
        await self._stream(codec.decode_generation(request.spec), context, inference_pb2.StreamGenerateResponse)

    async def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> Any:
        reader = await self._start(codec.decode_chat(request.spec), context)
        return await _read_whole(reader, inference_pb2.ChatResponse())

    async def StreamChat(self, request: inference_pb2.StreamChatRequest, context: Any) -> Any:
        await self._stream(codec.decode_chat(request.spec), context, inference_pb2.StreamChatResponse)

    async def ResumeGenerate(self, request: inference_pb2.ResumeGenerateRequest, context: Any) -> Any:
        resume = replace(codec.decode_resume(request), tenant=tenant_of(context))
        if resume.request is not None:
            resume = replace(resume, request=replace(resume.request, tenant=resume.tenant))
        name = resume.request.model if resume.request else ""
        await self._write(self._resume(resume, context), name, context, inference_pb2.ResumeGenerateResponse)

    async def _resume(self, resume: ResumeRequest, context: Any) -> Reader:
        return _watched(await self._generation.resume(resume), context)

    async def _write(
        self, starting: Coroutine[Any, Any, Reader], model: str, context: Any, response: type[StreamResponse]
    ) -> None:
        """Writes a reader's events to the call's stream. If the call ends, gRPC cancels the pending write."""
        seq = itertools.count()
        if self._generation.is_loading(model):
            starting = self._announce(starting, model, lambda event: _write_event(context, response, event, next(seq)))
        reader = await starting
        try:
            async for event in reader:
                await _write_event(context, response, event, next(seq))
        finally:
            reader.close()

    async def _announce(
        self, starting: Coroutine[Any, Any, Reader], model: str, write: Callable[[Event], Awaitable[None]]
    ) -> Reader:
        """Returns a reader that has its first event; until then writes what the loading of the model waits for."""
        begun = asyncio.create_task(_begin(starting))
        try:
            async for message in self._generation.loading(model, begun):
                await write(Loading(message))
            return await begun
        finally:
            begun.cancel()

    async def CancelGenerate(self, request: inference_pb2.CancelGenerateRequest, context: Any) -> Any:
        cancelled, pending = await self._generation.cancel(request.request_ids, tenant=tenant_of(context))
        return inference_pb2.CancelGenerateResponse(cancelled_request_ids=cancelled, pending_request_ids=pending)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> Any:
        call = codec.decode_embed(request, tenant_of(context), context.time_remaining())
        return encode_embeddings(await self._generation.model_of(call.options.model).pooling.embed(call))

    async def Score(self, request: inference_pb2.ScoreRequest, context: Any) -> Any:
        call = codec.decode_score(request, tenant_of(context), context.time_remaining())
        return encode_scores(await self._generation.model_of(call.options.model).pooling.score(call))

    async def Classify(self, request: inference_pb2.ClassifyRequest, context: Any) -> Any:
        call = codec.decode_classify(request, tenant_of(context), context.time_remaining())
        return encode_classifications(await self._generation.model_of(call.options.model).pooling.classify(call))

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> Any:
        self._generation.resolve_model(request.model)
        prompt = replace(codec.decode_tokenize(request), tenant=tenant_of(context))
        token_ids = await self._generation.prompt_of(prompt)
        return inference_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: inference_pb2.DetokenizeRequest, context: Any) -> Any:
        self._generation.resolve_model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._generation.model_of(request.model).text_of(
            request.token_ids, request.model, tenant_of(context), skip_special_tokens=skip
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(self, request: inference_pb2.ListModelsRequest, context: Any) -> Any:
        return inference_pb2.ListModelsResponse(models=map(MODEL.encode, self._generation.models()))


def _watched(reader: Reader, context: Any) -> Reader:
    """Closes a reader as soon as its client leaves, even while the handler is busy."""
    context.add_done_callback(lambda _: reader.close())
    return reader


async def _read_whole(reader: Reader, response: W) -> W:
    reader.be_patient()
    deltas: dict[int, list[Delta]] = {}
    choices: list[inference_pb2.Choice] = []
    try:
        async for event in reader:
            if isinstance(event, Accepted):
                response.accepted.CopyFrom(encode_accepted(event))
            elif isinstance(event, Delta):
                deltas.setdefault(event.index, []).append(event)
            elif isinstance(event, PromptLogprobs):
                response.prompt_logprobs.CopyFrom(encode_prompt_logprobs(event))
            elif isinstance(event, Finished):
                choices.append(codec.encode_choice(deltas.get(event.index, ()), event))
    finally:
        reader.close()
    response.choices.extend(sorted(choices, key=lambda choice: choice.index))
    return response


async def _begin(starting: Coroutine[Any, Any, Reader]) -> Reader:
    """Starts a reader and waits for its first event."""
    reader = await starting
    try:
        await reader.wait_until_begun()
    except BaseException:
        reader.close()
        raise
    return reader


async def _write_event(context: Any, response: type[StreamResponse], event: Event, seq: int) -> None:
    await context.write(response(event=encode_event(event, seq)))


def add_inference_service(server: grpc.aio.Server, servicer: InferenceServicer) -> None:
    add_service(server, SERVICE, servicer)
