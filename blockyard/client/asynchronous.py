"""The asynchronous client of the public API: `blockyard.client.sync` for asyncio."""

# ruff: noqa: ASYNC109 - the timeout is sent to the server and covers all tries, unlike asyncio.timeout.

from __future__ import annotations

import asyncio
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import grpc
import grpc.aio

from blockyard.client import codec
from blockyard.client.access import ClientAccess, ClientTls
from blockyard.client.pooling_calls import AsyncPoolingCalls
from blockyard.client.resumption import Resumption
from blockyard.client.retry import Attempts, Deadline, RetryPolicy, may_pass
from blockyard.client.sync import method_of
from blockyard.client.targets import (
    CANCEL_SECONDS,
    DEFAULT_TARGET,
    HEALTH_METHOD,
    POLL_SECONDS,
    SERVING,
    Metadata,
    Targets,
    make_never_ready_error,
)
from blockyard.clock import SYSTEM, Clock
from blockyard.contract.codec.models import MODEL
from blockyard.contract.events import Delta, Event
from blockyard.errors import BlockyardError, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.tracing.spans import active_trace_metadata
from blockyard.transport import GRPC, Transport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from blockyard.client.chat import ChatOptions, Messages
    from blockyard.client.results import Completion, GenerationOptions
    from blockyard.contract.models import Model

# The published type stubs of grpc.aio lack EOF.
_EOF: Any = cast("Any", grpc.aio).EOF


class AsyncConnections:
    """A client's channels, one to each of its gateways, opened on the loop that first uses them."""

    def __init__(self, targets: Targets, access: ClientAccess) -> None:
        self.targets = targets
        self._access = access
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._cancellations: set[asyncio.Task[None]] = set()

    def _channel(self, target: str) -> grpc.aio.Channel:
        # Opened on first use: a channel belongs to the event loop that runs when it is created.
        if target not in self._channels:
            self._channels[target] = self._access.make_aio_channel(target)
        return self._channels[target]

    def send(self, target: str, method: str, request: Any, seconds: float | None, extra: Metadata = ()) -> Any:
        """Calls a gateway. Awaiting or reading the returned call raises grpc.RpcError. `extra`: more metadata."""
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(target))
        return getattr(stub, method)(request, timeout=seconds, metadata=(*self._access.metadata, *extra))

    def cancel(self, request_id: str) -> None:
        """Starts to cancel a request and returns at once."""
        task = asyncio.create_task(self._cancel(request_id))
        # The event loop holds only a weak reference to a task.
        self._cancellations.add(task)
        task.add_done_callback(self._cancellations.discard)

    async def _cancel(self, request_id: str) -> None:
        request = inference_pb2.CancelGenerateRequest(request_ids=[request_id])
        for _ in self.targets:
            target = self.targets.current
            try:
                await self.send(target, "CancelGenerate", request, CANCEL_SECONDS)
            except grpc.RpcError:
                self.targets.on_failure(target)
            else:
                return

    async def is_ready(self, target: str, seconds: float | None) -> bool:
        """Returns whether a gateway takes requests; raises BlockyardError if it cannot be reached."""
        check: Any = self._channel(target).unary_unary(HEALTH_METHOD, None, None)
        try:
            return await check(b"", timeout=seconds) == SERVING
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        """Cancels running calls and closes the channels within a second. A later call opens them again."""
        if self._cancellations:
            await asyncio.wait(self._cancellations, timeout=CANCEL_SECONDS)
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)


class AsyncStream:
    """The events of one request: `blockyard.client.sync.Stream` for `async for` and `async with`.

    Cancelling the task that reads it cancels the request too.
    """

    def __init__(self, connections: AsyncConnections, resumption: Resumption) -> None:
        self._connections = connections
        self._resumption = resumption
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # The trace of the span that opened the stream; another span may read it.
        self._trace = active_trace_metadata()
        self._open()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # gRPC ends the call itself. This may run in any thread, or after the loop was closed.
        if not self._closed.is_set() and self._resumption.needs_cancel:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._connections.cancel, self._resumption.request_id)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._next()
        except asyncio.CancelledError:
            # When `close` cancels the call, reading raises CancelledError though nobody cancelled this task.
            task = asyncio.current_task()
            if self._closed.is_set() and task is not None and not task.cancelling():
                raise StopAsyncIteration from None
            self.close()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def _next(self) -> Event | None:
        """Waits for the next event, resuming broken calls; None after the last event or after `close`."""
        while not self._closed.is_set():
            try:
                response = await self._call.read()
                if response is _EOF:
                    self._resumption.on_end()
                    self._closed.set()
                elif (event := self._resumption.on_message(response.event)) is not None:
                    return event
            except grpc.RpcError as error:
                await self._go_on(from_rpc_error(error))
            except BlockyardError as error:
                await self._go_on(error)
        return None

    def _open(self) -> None:
        request = self._resumption.next_request()
        self._target = self._connections.targets.current
        seconds = self._resumption.deadline.remaining()
        self._call = self._connections.send(self._target, method_of(request), request, seconds, self._trace)

    async def _go_on(self, error: BlockyardError) -> None:
        """Opens a new call if the request survives the failure; otherwise raises it."""
        if self._closed.is_set():
            return
        try:
            delay_seconds = self._resumption.delay_after(error)
        except BlockyardError:
            self.close()
            raise error from None
        self._call.cancel()
        self._connections.targets.on_failure(self._target)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay_seconds)
        if not self._closed.is_set():
            self._open()

    @property
    def request_id(self) -> str:
        """The request's id, with which `AsyncClient.resume` reads the answer from any process."""
        return self._resumption.request_id

    @property
    def num_resumes(self) -> int:
        return self._resumption.num_resumes

    async def text_deltas(self, index: int = 0) -> AsyncIterator[str]:
        """Yields the text of the sequence `index`, piece by piece."""
        async for event in self:
            if isinstance(event, Delta) and event.index == index and event.text:
                yield event.text

    async def result(self) -> Completion:
        """Reads the remaining events and returns the whole answer."""
        async for _ in self:
            pass
        return self._resumption.make_completion()

    def close(self) -> None:
        """Cancels the request, unless it has ended. Does not wait."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._call.cancel()
        if self._resumption.needs_cancel:
            self._connections.cancel(self._resumption.request_id)


class AsyncClient(AsyncPoolingCalls):
    """A client of one gateway or several: `blockyard.Client` for asyncio.

    It connects on the first call, on the event loop that makes the call.

    async with blockyard.AsyncClient("127.0.0.1:50051") as client:
        completion = await client.generate("Once upon a time", max_tokens=50)
        async with client.stream("Once upon a time", seed=1) as stream:
            async for text in stream.text_deltas():
                print(text, end="", flush=True)
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        retry: RetryPolicy | None = None,
        tenant: str = "",
        api_key: str = "",
        tls: ClientTls | bool = False,
        clock: Clock = SYSTEM,
        transport: Transport = GRPC,
    ) -> None:
        """`clock`: gives the time and draws ids and delays. `transport`: opens the channels."""
        self._targets = Targets(target)
        self._retry = retry or RetryPolicy()
        self._clock = clock
        self._connections = AsyncConnections(self._targets, ClientAccess(tenant, api_key, tls, transport))
        # In the order in which they were opened.
        self._streams: weakref.WeakKeyDictionary[AsyncStream, None] = weakref.WeakKeyDictionary()

    @property
    def target(self) -> str:
        """The gateways' addresses, separated by commas."""
        return str(self._targets)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels running requests and closes the connections. A later call opens them again."""
        for stream in tuple(self._streams):
            stream.close()
        await self._connections.close()

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Completion:
        """Generates the whole answer to a prompt: a text, or token ids, which are used unchanged."""
        async with self.stream(prompt, timeout=timeout, **options) as stream:
            return await stream.result()

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncStream:
        """Generates an answer as a stream of events."""
        return self._open_stream(Resumption(codec.make_spec(prompt, options), self._make_attempts(timeout)))

    async def chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> Completion:
        """Generates the whole answer to a conversation: `Message`s, or mappings in OpenAI's form."""
        async with self.stream_chat(messages, timeout=timeout, **options) as stream:
            return await stream.result()

    def stream_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncStream:
        """Generates an answer to a conversation as a stream of events."""
        return self._open_stream(Resumption(codec.make_chat_spec(messages, options), self._make_attempts(timeout)))

    def resume(self, request_id: str, *, timeout: float | None = None) -> AsyncStream:
        """Reads a request that another client started, from its beginning; see `Client.resume`."""
        return self._open_stream(Resumption(None, self._make_attempts(timeout), request_id=request_id))

    def _make_attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, timeout, len(self._targets), self._clock)

    def _open_stream(self, resumption: Resumption) -> AsyncStream:
        stream = AsyncStream(self._connections, resumption)
        self._streams[stream] = None
        return stream

    async def cancel(self, *request_ids: str, timeout: float | None = None) -> list[str]:
        """Cancels requests, and returns the ids of those that were running. An unknown id is no error.

        A scheduler that has just started may not know a request yet: it cancels the request if a gateway brings it, and
        the id is returned too.
        """
        request = inference_pb2.CancelGenerateRequest(request_ids=request_ids)
        response = await self._call("CancelGenerate", request, timeout)
        return [*response.cancelled_request_ids, *response.pending_request_ids]

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, timeout: float | None = None
    ) -> list[int]:
        """Turns text into the token ids that a prompt of this text would have."""
        request = inference_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        return list((await self._call("Tokenize", request, timeout)).token_ids)

    async def tokenize_chat(
        self, messages: Messages, *, timeout: float | None = None, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """Turns a conversation into the token ids of its prompt, for example to count them."""
        spec = codec.make_chat_spec(messages, options)
        request = inference_pb2.TokenizeRequest(model=spec.model, conversation=spec.conversation)
        return list((await self._call("Tokenize", request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        request = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await self._call("Detokenize", request, timeout)).text

    async def list_models(self, *, timeout: float | None = None) -> list[Model]:
        response = await self._call("ListModels", inference_pb2.ListModelsRequest(), timeout)
        return [MODEL.decode(model) for model in response.models]

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until a gateway takes requests. Raises BlockyardError (NO_READY_WORKER) after `timeout` seconds."""
        deadline = Deadline(timeout, self._clock)
        cause: BlockyardError | None = None
        while True:
            for target in self._targets:
                try:
                    if await self._connections.is_ready(target, deadline.remaining(1.0)):
                        self._targets.prefer(target)
                        return
                    cause = None
                except BlockyardError as error:
                    cause = error
            if not deadline.allows(POLL_SECONDS):
                raise make_never_ready_error(self._targets, cause)
            await asyncio.sleep(POLL_SECONDS)

    async def _call(self, method: str, request: Any, timeout: float | None) -> Any:
        attempts = self._make_attempts(timeout)
        while True:
            target = self._targets.current
            try:
                return await self._connections.send(target, method, request, attempts.deadline.remaining())
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            if not may_pass(error):
                raise error
            self._targets.on_failure(target)
            await asyncio.sleep(attempts.delay_after(error))
