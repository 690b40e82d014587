"""The asynchronous client of the public API: `blockyard.client` for asyncio."""

# ruff: noqa: ASYNC109 - a timeout is sent to the server, and it covers all tries: more than asyncio.timeout can do.

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard import client_codec as codec
from blockyard.client import DEFAULT_TARGET, POLL_SECONDS, client_channel_options, never_ready
from blockyard.errors import BlockyardError, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.results import Completion, CompletionBuilder, Delta, Event, GenerationOptions, Model
from blockyard.retry import Attempts, Deadline, RetryPolicy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

Response = TypeVar("Response")


class AsyncStream:
    """The events of one request, as they come: `blockyard.client.Stream` for `async for` and `async with`."""

    def __init__(self, open_call: Callable[[float | None], Any], num_sequences: int, attempts: Attempts) -> None:
        self._open_call = open_call
        self._attempts = attempts
        self._reader = codec.EventReader(num_sequences)
        self._builder = CompletionBuilder()
        self._closed = False
        self._started = False
        self._call = open_call(attempts.deadline.remaining())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        response = await self._receive()
        if response is None:
            raise StopAsyncIteration
        event = self._reader.read(response)
        self._builder.add(event)
        return event

    async def _receive(self) -> inference_pb2.StreamGenerateResponse | None:
        while not self._closed:
            try:
                response = await self._call.read()
            except grpc.RpcError as rpc_error:
                await self._try_again(from_rpc_error(rpc_error))
                continue
            except asyncio.CancelledError:
                # A call that `close` cancelled looks as if this task had been.
                if self._closed:
                    return None
                raise
            self._started = True
            if isinstance(response, inference_pb2.StreamGenerateResponse):
                return response
            self._reader.end()
            return None
        return None

    async def _try_again(self, error: BlockyardError) -> None:
        """Opens the call anew if nothing has come yet and the failure may pass; else raises it."""
        if self._closed:
            return
        if self._started:
            raise error from None
        await asyncio.sleep(self._attempts.delay_after(error))
        if not self._closed:
            self._call = self._open_call(self._attempts.deadline.remaining())

    async def text_deltas(self, index: int = 0) -> AsyncIterator[str]:
        """Yields the text of one of the sequences, piece by piece."""
        async for event in self:
            if isinstance(event, Delta) and event.index == index and event.text:
                yield event.text

    async def result(self) -> Completion:
        """Reads what is left, and returns the whole answer."""
        async for _ in self:
            pass
        return self._builder.build()

    def close(self) -> None:
        """Cancels the request, unless it has ended."""
        self._closed = True
        self._call.cancel()


class AsyncClient:
    """Talks to a gateway: `blockyard.Client` for asyncio. It connects in the first call, on the loop that makes it.

    async with blockyard.AsyncClient("127.0.0.1:50051") as client:
        completion = await client.generate("Once upon a time", max_tokens=50)
        async with client.stream("Once upon a time", seed=1) as stream:
            async for text in stream.text_deltas():
                print(text, end="", flush=True)
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, retry: RetryPolicy | None = None) -> None:
        self.target = target
        self._retry = retry or RetryPolicy()
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; what is running is cancelled. A later call opens it again."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    def _connect(self) -> grpc.aio.Channel:
        # Not before: a channel belongs to the loop that runs when it is made.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.target, client_channel_options(self.target))
        return self._channel

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceServiceAsyncStub:
        return inference_pb2_grpc.InferenceServiceStub(self._connect())

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Generates the whole answer to a prompt: text, or token ids to which nothing is added."""
        request = inference_pb2.GenerateRequest(spec=codec.make_spec(prompt, options))
        return codec.to_completion(await self._call(self._stub.Generate, request, timeout))

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncStream:
        """Generates an answer as a stream of events."""
        request = inference_pb2.StreamGenerateRequest(spec=codec.make_spec(prompt, options))
        stub = self._stub

        def open_call(seconds: float | None) -> Any:
            return stub.StreamGenerate(request, timeout=seconds)

        return AsyncStream(open_call, options.get("n") or 1, Attempts(self._retry, timeout))

    async def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Cancels requests, and returns the ids of those that were running. An unknown id is no error."""
        request = inference_pb2.CancelGenerateRequest(request_ids=request_ids)
        return list((await self._call(self._stub.CancelGenerate, request, timeout)).cancelled_request_ids)

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> list[int]:
        """Turns text into the token ids that a prompt of this text would have."""
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """Turns token ids into text."""
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await self._call(self._stub.Detokenize, request, timeout)).text

    async def list_models(self, *, timeout: float | None = None) -> list[Model]:
        """Lists the models that are served."""
        return codec.to_models(await self._call(self._stub.ListModels, inference_pb2.ListModelsRequest(), timeout))

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Returns when the gateway takes requests. Raises BlockyardError (NO_READY_WORKER) when time runs out."""
        deadline = Deadline(timeout)
        stub: Any = health_pb2_grpc.HealthStub(self._connect())
        cause: BlockyardError | None = None
        while True:
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=deadline.remaining(1.0))
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                cause = None
            except grpc.RpcError as error:
                cause = from_rpc_error(error)
            if not deadline.allows(POLL_SECONDS):
                raise never_ready(self.target, cause)
            await asyncio.sleep(POLL_SECONDS)

    async def _call(self, method: Callable[..., Awaitable[Response]], request: Any, timeout: float | None) -> Response:
        attempts = Attempts(self._retry, timeout)
        while True:
            try:
                return await method(request, timeout=attempts.deadline.remaining())
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            await asyncio.sleep(attempts.delay_after(error))
