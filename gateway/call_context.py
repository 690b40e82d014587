"""Keeps the current client call in a context variable: its method, its headers and the request's id.

The fronts set the call, and a request reads it when it begins. A context variable reaches every task of the call
without being passed as an argument. Also checks the tenant of a call.
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
    """A call of a client.

    Attributes:
        method: `Service/Method` for gRPC; the method and the path for HTTP.
        headers: the headers as received.
        request_id: the id of the call's request, not validated; empty before it is known.
    """

    method: str = ""
    headers: Iterable[tuple[str | bytes, str | bytes]] = ()
    request_id: str = ""

    @property
    def trace_context(self) -> TraceContext | None:
        """The trace context of the caller; None if the headers have no valid one."""
        return read_trace_context(self.headers)


_NO_CALL = Call()
_current: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def current_call() -> Call:
    """Returns the call of this task; outside of calls, an empty call."""
    return _current.get()


def name_request(request_id: str) -> None:
    """Records the id of the call's request.

    Only the first id is recorded: a call with several prompts first records its own id, then those of its requests.
    """
    call = _current.get()
    if call is not _NO_CALL and not call.request_id:
        call.request_id = request_id


def check_tenant(name: str | None) -> str:
    """Returns the tenant of a call: the caller's own tenant, else the tenant that the call names, else an empty text.

    Raises BlockyardError FIELD_INVALID, or PERMISSION_DENIED if the call names another tenant than the caller's own.
    """
    own = CALLER.get().tenant
    if own is not None and name not in (None, own):
        raise BlockyardError(
            Reason.PERMISSION_DENIED, f"this caller belongs to the tenant {own}: leave {TENANT_KEY} out"
        )
    if own is not None:
        return own
    if name is None:
        return ""
    if _TENANT.fullmatch(name) is None:
        raise invalid([Violation(TENANT_KEY, "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")])
    return name


def with_grpc_call(method: str, answer: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Wraps the handler of a gRPC method, and sets the current call for it. `method`: `Service/Method`."""

    async def noted(request: Any, context: Any) -> Any:
        _current.set(Call(method, context.invocation_metadata() or ()))
        return await answer(request, context)

    return noted


def with_http_call(app: ASGIApp) -> ASGIApp:
    """Wraps an application, and sets the current call for each HTTP request."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _current.set(Call(f"{scope['method']} {scope['path']}", scope["headers"]))
        await app(scope, receive, send)

    return noted
