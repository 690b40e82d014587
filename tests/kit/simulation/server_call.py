"""The server's side of a simulated call: its context, and the task that runs its handler as grpc.aio does."""

from __future__ import annotations

import asyncio
import inspect
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from grpc._cython import cygrpc

from tests.kit.simulation.streams import CREDIT, END, MESSAGE, RESET, Metadata, Stream, sendable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.kit.simulation.server import ServerCore

log = logging.getLogger(__name__)

Handler = Any


class CallDetails(NamedTuple):
    """What an interceptor learns of a call."""

    method: str
    invocation_metadata: Metadata


class ServicerContext:
    """What a handler gets beside its request. Compression and identities of peers are left out."""

    def __init__(self, call: ServerCall, handler: Handler) -> None:
        self._call = call
        self._handler = handler

    async def read(self) -> Any:
        self._call.check_running()
        message = await self._call.stream.read()
        self._call.check_running()
        return cygrpc.EOF if message is None else _convert(self._handler.request_deserializer, message)

    async def write(self, message: Any) -> None:
        self._call.check_running()
        await self._call.write(_convert(self._handler.response_serializer, message))

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._call.check_running()
        if self._call.has_sent_headers:
            raise cygrpc.UsageError("Send initial metadata failed: already sent")
        self._call.send_headers(sendable(metadata))
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        call = self._call
        if call.abort_error is not None:
            raise cygrpc.UsageError("Abort already called!")
        call.abort_error = cygrpc.AbortError("Locally aborted.")
        call.trailing_metadata = tuple(trailing_metadata) or call.trailing_metadata
        call.details = details or call.details
        call.code = code
        await call.send_status()
        raise call.abort_error

    async def abort_with_status(self, status: grpc.Status) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)  # type: ignore[attr-defined]

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._call.trailing_metadata = tuple(metadata)

    def trailing_metadata(self) -> Metadata:
        return self._call.trailing_metadata

    def invocation_metadata(self) -> Metadata:
        return self._call.call_details.invocation_metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self._call.code = code

    def code(self) -> grpc.StatusCode | None:
        return self._call.code

    def set_details(self, details: str) -> None:
        self._call.details = details

    def details(self) -> str:
        return self._call.details

    def peer(self) -> str:
        return self._call.peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def time_remaining(self) -> float | None:
        return self._call.time_remaining()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._call.callbacks.append(partial(callback, self))

    def done(self) -> bool:
        return self._call.has_sent_status

    def cancelled(self) -> bool:
        return self._call.code is grpc.StatusCode.CANCELLED


class _Requests:
    """The requests of a stream, for handlers that iterate over them."""

    def __init__(self, context: ServicerContext) -> None:
        self._context = context
        self._messages: AsyncIterator[Any] | None = None

    async def _read(self) -> AsyncIterator[Any]:
        while (message := await self._context.read()) is not cygrpc.EOF:
            yield message

    def __aiter__(self) -> AsyncIterator[Any]:
        # Made when it is used: one that is never iterated over would be warned of.
        if self._messages is None:
            self._messages = self._read()
        return self._messages

    async def __anext__(self) -> Any:
        return await anext(aiter(self))


def _convert(coder: Callable[[Any], Any] | None, message: Any) -> Any:
    return message if coder is None else coder(message)


class ServerCall:
    """One call. `task` runs its handler."""

    def __init__(
        self, server: ServerCore, stream: Stream, details: CallDetails, timeout: float | None, peer: str
    ) -> None:
        self.stream = stream
        self.call_details = details
        self.peer = peer
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing_metadata: Metadata = ()
        self.abort_error: BaseException | None = None
        self.has_sent_headers = False
        self.has_sent_status = False
        self.callbacks: list[Callable[[], object]] = []
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._timer = None if timeout is None else self._loop.call_later(timeout, self.cancel)
        self.task = self._loop.create_task(self._run(), name=f"call {details.method}")
        self.task.add_done_callback(self._on_done)

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def on_frame(self, kind: str, *values: Any) -> None:
        if kind is MESSAGE:
            self._on_message(values[0])
        elif kind is CREDIT:
            self.stream.on_credit(values[0])
        elif kind is END:
            self.stream.on_peer_end()
        elif kind is RESET:
            self.cancel()

    def _on_message(self, message: bytes) -> None:
        limit = self._server.options.max_receive_bytes
        if len(message) > limit:
            details = f"SERVER: Received message larger than max ({len(message)} vs. {limit})"
            self.cancel(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        else:
            self.stream.on_message(message)

    def cancel(self, code: grpc.StatusCode | None = None, details: str = "") -> None:
        """Ends the call and its handler, because the client is gone; or else `code` and `details` say why."""
        if code is not None:
            self.stream.reset(code.value[0], details)
        self.stream.close()
        if not self.has_sent_status:
            self.task.cancel()

    def _on_done(self, _: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            for callback in self.callbacks:
                callback()
        except Exception:
            log.exception("Error in callback for method [%s]", self.call_details.method)

    # What the handler sends.

    def check_running(self) -> None:
        if self.abort_error is not None:
            raise self.abort_error
        if self.has_sent_status:
            raise cygrpc.UsageError("RPC already finished.")

    def send_headers(self, metadata: Metadata = ()) -> None:
        if not self.has_sent_headers:
            self.has_sent_headers = True
            self.stream.send_headers(metadata)

    def _check_sendable(self, message: bytes) -> None:
        limit = self._server.options.max_send_bytes
        if len(message) > limit:
            details = f"SERVER: Sent message larger than max ({len(message)} vs. {limit})"
            self.stream.reset(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], details)
        if self.stream.is_over:
            raise cygrpc.ExecuteBatchError("the call is over")

    async def write(self, message: bytes) -> None:
        self._check_sendable(message)
        self.send_headers()
        await self.stream.write(message)

    async def send_status(self) -> None:
        """Sends the status that is set."""
        self.has_sent_status = True
        if self.stream.is_over:
            await asyncio.sleep(0)
            raise cygrpc.ExecuteBatchError("the call is over")
        self.send_headers()
        code = self.code or grpc.StatusCode.OK
        details = "" if code is grpc.StatusCode.OK else self.details
        self.stream.send(END, code.value[0], details, sendable(self.trailing_metadata))
        self.stream.finish()
        await asyncio.sleep(0)

    # The handler.

    async def _run(self) -> None:
        method = self.call_details.method
        try:
            await self._answer()
        except cygrpc.AbortError as error:
            assert error is self.abort_error, "Abort error has been replaced!"
        except asyncio.CancelledError:
            log.debug("RPC cancelled for servicer method [%s]", method)
        except cygrpc.ExecuteBatchError:
            log.debug("the client of [%s] is gone", method)
        except Exception as error:
            log.exception("Unexpected [%s] raised by servicer method [%s]", type(error).__name__, method)
            await self._send_error(error)

    async def _send_error(self, error: Exception) -> None:
        if self.has_sent_status or self.stream.is_over:
            return
        if self.code in (None, grpc.StatusCode.OK):
            self.code = grpc.StatusCode.UNKNOWN
        self.details = f"Unexpected {type(error)}: {error}"
        await self.send_status()

    async def _answer(self) -> None:
        await self._server.until_started()
        handler = await self._find_handler(iter(self._server.interceptors), self.call_details)
        if handler is None:
            self.code, self.details = grpc.StatusCode.UNIMPLEMENTED, "Method not found!"
            await self.send_status()
            return
        context = ServicerContext(self, handler)
        if handler.request_streaming:
            request: Any = _Requests(context)
        else:
            content = await self.stream.read()
            if content is None:
                # The client cancelled the call before its request.
                return
            request = _convert(handler.request_deserializer, content)
        if handler.response_streaming:
            await self._answer_with_many(handler, request, context)
        else:
            await self._answer_with_one(handler, request, context)

    async def _find_handler(self, interceptors: Any, details: Any) -> Handler:
        interceptor = next(interceptors, None)
        if interceptor is None:
            return self._server.find_handler(details)
        return await interceptor.intercept_service(partial(self._find_handler, interceptors), details)

    async def _answer_with_one(self, handler: Handler, request: Any, context: ServicerContext) -> None:
        answer: Callable[[Any, Any], Awaitable[Any]] = handler.stream_unary or handler.unary_unary
        response = await answer(request, context)
        self.check_running()
        if self.code in (None, grpc.StatusCode.OK):
            content = _convert(handler.response_serializer, response)
            self._check_sendable(content)
            self.send_headers()
            self.stream.post(content)
        await self.send_status()

    async def _answer_with_many(self, handler: Handler, request: Any, context: ServicerContext) -> None:
        answer = handler.stream_stream or handler.unary_stream
        if inspect.isasyncgenfunction(answer):
            async for response in answer(request, context):
                self.check_running()
                await context.write(response)
        else:
            await answer(request, context)
        self.check_running()
        await self.send_status()
