"""Remembers the call that a request comes by: its method and its headers.

The fronts set it, and requests read it where they begin. It is a context variable, so that it reaches every task of a
call without being a part of the request.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.tracing.spans import TraceContext, read_trace_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class Call:
    """A call. `method`: that of gRPC with its service, or that of HTTP with its path."""

    method: str = ""
    headers: Iterable[tuple[str | bytes, str | bytes]] = ()

    @property
    def trace_context(self) -> TraceContext | None:
        """The caller's span, if it has one."""
        return read_trace_context(self.headers)


_NO_CALL = Call()
_current: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def current_call() -> Call:
    """Returns the call that this task works for; one without a method where there is none."""
    return _current.get()


def with_grpc_call(method: str, answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Wraps the handler of a gRPC method, `Service/Method`."""

    async def noted(request: Any, context: Any) -> Any:
        _current.set(Call(method, context.invocation_metadata() or ()))
        return await answer(request, context)

    return noted


def with_http_call(app: ASGIApp) -> ASGIApp:
    """Wraps an application."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(Call(f"{scope['method']} {scope['path']}", scope["headers"]))
        await app(scope, receive, send)

    return noted
