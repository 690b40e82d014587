"""Interceptors between gRPC and our handlers: they check callers, turn exceptions into status codes, count calls."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio

from blockyard.errors import TABLE, BlockyardError, Reason, to_call_status
from blockyard.security.authentication import Authenticator, Credentials, find_key
from blockyard.security.tls import peer_common_name, peer_names
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from contextlib import AbstractContextManager

    from blockyard.service.metrics import Counter

    Coroutine = Callable[[Any, Any], Awaitable[Any]]
    Stream = Callable[[Any, Any], AsyncGenerator[Any]]

log = EventLogger(__name__)

# Calls of probes and tools say nothing about a service.
_UNCOUNTED = ("/grpc.health.", "/grpc.reflection.")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BlockyardError) -> None:
    """Ends a call with an error and its details. Never returns: it raises what ends the handler."""
    # The published stubs of grpc.aio lack this method.
    await cast("Any", context).abort_with_status(to_call_status(error))


def call_has_ended(error: BaseException) -> bool:
    """Whether a handler failed because its call is over: its client went away while it wrote, or the server stopped.

    gRPC cancels such a handler, but may tell it first that its message could not be sent.
    """
    bases: Any = grpc.aio
    return isinstance(error, bases.BaseError) and not isinstance(error, bases.UsageError | grpc.aio.AbortError)


# How a handler is made, and where grpc keeps its behaviour, by (request_streaming, response_streaming).
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
    """Makes a handler like another one, which answers inside of what `enter` makes of the call's context."""
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
    """Lets calls that the authenticator admits through to their handlers."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        # A method that nobody answers needs no guard.
        if handler is None or self._authenticator.is_open(method):
            return handler
        return within(handler, lambda context: self._authenticator.enter(_credentials(context), method))


def _credentials(context: Any) -> Credentials:
    shown = context.auth_context()
    key = find_key(dict(context.invocation_metadata() or ()))
    return Credentials(key, peer_common_name(shown), peer_names(shown))


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns what a handler raises into a status: a BlockyardError as it is, anything else into BUG with a log line.

    A cancelled handler whose client is still there would leave it hanging: it gets DRAINING, since only a server
    that stops cancels its handlers.
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
            # A call that ends while a message is being sent must not leave the handler suspended until it is collected.
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
    # What ends the call is kept with its context, whose frames these are: they and the request that they have would
    # stay until the collector runs.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    # The call may have ended meanwhile, by its client or by the server's stop: then nobody is left to answer.
    with suppress(grpc.aio.InternalError):
        await abort(context, reported)
    raise asyncio.CancelledError


class CallCounter(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts calls by method and status code, and reports the errors that end them.

    Stands behind the ErrorInterceptor, where errors still are what they were raised as.

    Args:
        calls: by method and status code.
        on_error: called with the reason of each call that ends with an error.
    """

    def __init__(self, calls: Counter, on_error: Callable[[Reason], None] = lambda reason: None) -> None:
        self._calls = calls
        self._on_error = on_error

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        # Names that no service has must not become labels.
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
    """Finds why a call ended, as ErrorInterceptor reports it to the client.

    A handler is cancelled when its client has left, and cannot distinguish that from a server that stops; but then
    ours end their calls themselves.
    """
    if isinstance(error, BlockyardError):
        return error.reason
    if isinstance(error, asyncio.CancelledError | GeneratorExit) or call_has_ended(error):
        return Reason.CLIENT_CANCELLED
    return Reason.BUG
