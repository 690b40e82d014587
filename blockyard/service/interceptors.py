"""gRPC server interceptors: authenticate callers, turn exceptions into status codes, count calls."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from blockyard.errors import TABLE, BlockyardError, Reason, to_call_status
from blockyard.security.authentication import Authenticator, Credentials, find_key
from blockyard.security.tls import peer_common_name, peer_names
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

    from blockyard.service.metrics import Counter

    Coroutine = Callable[[Any, Any], Awaitable[Any]]
    Stream = Callable[[Any, Any], AsyncGenerator[Any]]

log = EventLogger(__name__)

# Calls of health probes and tools are not counted.
_UNCOUNTED = ("/grpc.health.", "/grpc.reflection.")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BlockyardError) -> None:
    """Ends a call with an error and its details. Always raises, to end the handler."""
    # The published type stubs of grpc.aio lack abort_with_status.
    await cast("Any", context).abort_with_status(to_call_status(error))


def call_has_ended(error: BaseException) -> bool:
    """Returns whether a handler failed because its call has ended: the client left, or the server stopped.

    gRPC cancels such a handler, but may first raise an error from the handler's write.
    """
    bases: Any = grpc.aio
    return isinstance(error, bases.BaseError) and not isinstance(error, bases.UsageError | grpc.aio.AbortError)


# The factory of a handler and the attribute of its function, by (request_streaming, response_streaming).
_KINDS: dict[tuple[bool, bool], tuple[Any, str]] = {
    (False, False): (grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): (grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): (grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): (grpc.stream_stream_rpc_method_handler, "stream_stream"),
}


def _behaviour(handler: Any) -> Any:
    return getattr(handler, _KINDS[handler.request_streaming, handler.response_streaming][1])


def _like(handler: Any, behaviour: Coroutine | Stream) -> Any:
    make, _ = _KINDS[handler.request_streaming, handler.response_streaming]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def within(handler: Any, enter: Callable[[Any], AbstractContextManager[object]]) -> Any:
    """Wraps a handler so that it runs inside the context manager that `enter` returns for a call's context."""
    inner = _behaviour(handler)

    async def coroutine(request: Any, context: Any) -> Any:
        with enter(context):
            return await inner(request, context)

    async def stream(request: Any, context: Any) -> AsyncGenerator[Any]:
        with enter(context):
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message

    return _like(handler, stream if inspect.isasyncgenfunction(inner) else coroutine)


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Passes only calls that the authenticator admits on to their handlers."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        # An unknown method (no handler) needs no guard.
        if handler is None or self._authenticator.is_open(method):
            return handler
        return within(handler, lambda context: self._authenticator.enter(_credentials(context), method))


def _credentials(context: Any) -> Credentials:
    shown = context.auth_context()
    key = find_key(dict(context.invocation_metadata() or ()))
    return Credentials(key, peer_common_name(shown), peer_names(shown))


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns a handler's exceptions into statuses: a BlockyardError keeps its reason, others become BUG and are logged.

    If a handler is cancelled while its client waits, the client gets DRAINING, since only a stopping server cancels
    handlers.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        if method.startswith("/grpc.health."):
            return handler
        inner = _behaviour(handler)
        guard = _guard_stream if inspect.isasyncgenfunction(inner) else _guard_coroutine
        return _like(handler, guard(inner, method))


def _guard_coroutine(inner: Coroutine, method: str) -> Coroutine:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request, context)
        except BaseException as error:  # noqa: BLE001 - this is the one boundary
            del request
            await _answer(error, context, method)

    return guarded


def _guard_stream(inner: Stream, method: str) -> Stream:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
        try:
            # Close the handler at once if the call ends during a send, instead of at garbage collection.
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - this is the one boundary
            del request
            await _answer(error, context, method)

    return guarded


async def _answer(error: BaseException, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, grpc.aio.AbortError | GeneratorExit | KeyboardInterrupt | SystemExit):
        raise error
    if call_has_ended(error):
        raise asyncio.CancelledError from None
    if isinstance(error, asyncio.CancelledError):
        if context.cancelled():
            raise error
        reported = BlockyardError(Reason.DRAINING, "this server is stopping", retry_after_seconds=1.0)
    elif isinstance(error, BlockyardError):
        reported = error
    else:
        log.exception("a handler failed", method=method)
        reported = BlockyardError(Reason.BUG, "internal error; the server's log has more")
    # gRPC keeps the exception that ends the call. Drop its traceback, whose frames refer to the request: both would
    # stay in memory until the garbage collector runs.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    # The client or the server's stop may have ended the call meanwhile: ignore the failure to answer.
    with suppress(grpc.aio.InternalError):
        await abort(context, reported)
    raise asyncio.CancelledError


class CallCounter(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts calls by method and status code, and reports the errors that end them.

    Must come after ErrorInterceptor in the list, where exceptions still have their original type.

    Args:
        calls: the counter, with the labels method and status code.
        on_error: called with the reason of each call that ends with an error.
    """

    def __init__(self, calls: Counter, on_error: Callable[[Reason], None] = lambda reason: None) -> None:
        self._calls = calls
        self._on_error = on_error

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        # Unknown method names must not become labels.
        if handler is None or method.startswith(_UNCOUNTED):
            return handler
        return within(handler, lambda _: self._count(method.removeprefix("/")))

    @contextmanager
    def _count(self, method: str) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            reason = _reason_of(error)
            self._calls.add(method, TABLE[reason].code.name)
            self._on_error(reason)
            raise
        self._calls.add(method, grpc.StatusCode.OK.name)


def _reason_of(error: BaseException) -> Reason:
    """Returns the reason that ErrorInterceptor reports to the client.

    A cancelled handler cannot tell a client that left from a server that stops, but Blockyard's servers end their calls
    themselves when they stop.
    """
    if isinstance(error, BlockyardError):
        return error.reason
    if isinstance(error, asyncio.CancelledError | GeneratorExit) or call_has_ended(error):
        return Reason.CLIENT_CANCELLED
    return Reason.BUG
