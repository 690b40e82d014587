"""Remembers the call that a request comes by: its method, its headers, and what the request is named.

The fronts set it, and requests read it where they begin. It is a context variable, so that it reaches every task of a
call without being a part of the request.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.contract.trace import TraceContext, read_trace_context
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.headers import TENANT_KEY, TENANT_PATTERN
from blockyard.security.authentication import CALLER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

_TENANT = re.compile(TENANT_PATTERN)


@dataclass(slots=True)
class Call:
    """A call.

    Attributes:
        method: that of gRPC with its service, or that of HTTP with its path.
        headers: as they came.
        request_id: of its request, which was not checked yet; empty before there is one.
    """

    method: str = ""
    headers: Iterable[tuple[str | bytes, str | bytes]] = ()
    request_id: str = ""

    @property
    def trace_context(self) -> TraceContext | None:
        """The caller's span, if it has one."""
        return read_trace_context(self.headers)


_NO_CALL = Call()
_current: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def current_call() -> Call:
    """Returns the call that this task works for; one without a method where there is none."""
    return _current.get()


def name_request(request_id: str) -> None:
    """Remembers what the request of the call is named.

    The first name counts: each request of a call of several prompts has the call's, with a number behind.
    """
    call = _current.get()
    if call is not _NO_CALL and not call.request_id:
        call.request_id = request_id


def check_tenant(name: str | None) -> str:
    """Returns the tenant of a call: its caller's own, else the one that it names, else the empty one.

    Raises BlockyardError FIELD_INVALID, or PERMISSION_DENIED where it names another one than its caller's.
    """
    own = CALLER.get().tenant
    if own is not None and name not in (None, own):
        raise BlockyardError(Reason.PERMISSION_DENIED, f"this caller is of the tenant {own}: leave {TENANT_KEY} out")
    if own is not None:
        return own
    if name is None:
        return ""
    if _TENANT.fullmatch(name) is None:
        raise invalid([Violation(TENANT_KEY, "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")])
    return name


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
