"""Counts the calls of a gRPC server by method and status code, and reports the errors that end them."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from blockyard.errors import TABLE, BlockyardError, Reason
from blockyard.service.interceptors import call_has_ended

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from blockyard.service.metrics import Counter

# Calls of probes and tools say nothing about a service.
_UNCOUNTED = ("/grpc.health.", "/grpc.reflection.")
_MAKERS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class CallCounter(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Stands behind the ErrorInterceptor, where errors still are what they were raised as.

    Args:
        calls: by method and status code.
        on_error: called with the reason of each call that ends with an error.
    """

    def __init__(self, calls: Counter, on_error: Callable[[Reason], None] = lambda reason: None) -> None:
        self._calls = calls
        self._on_error = on_error

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        # Names that no service has must not become labels.
        if handler is None or method.startswith(_UNCOUNTED):
            return handler
        field, make = _MAKERS[handler.request_streaming, handler.response_streaming]
        guarded = self._guard(getattr(handler, field), method.removeprefix("/"))
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _guard(self, inner: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def coroutine(request: Any, context: Any) -> Any:
            with self._count(method):
                return await inner(request, context)

        async def generator(request: Any, context: Any) -> AsyncGenerator[Any]:
            with self._count(method):
                async with aclosing(inner(request, context)) as messages:
                    async for message in messages:
                        yield message

        return generator if inspect.isasyncgenfunction(inner) else coroutine

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
