"""Reads the headers of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import Violation, invalid
from blockyard.headers import TENANT_KEY
from gateway.call_context import check_tenant
from gateway.request import REQUEST_ID_RULE, is_request_id

if TYPE_CHECKING:
    from fastapi import Request

_KEY = "Idempotency-Key"
# All clients of Anthropic send it.
ANTHROPIC_VERSION = "anthropic-version"


def read_tenant(request: Request) -> str:
    """Reads whose call it is; raises BlockyardError FIELD_INVALID."""
    return check_tenant(request.headers.get(TENANT_KEY))


def read_key(request: Request) -> str | None:
    """Reads the name under which a call can be sent again, as a request's; raises BlockyardError FIELD_INVALID."""
    key = request.headers.get(_KEY)
    if key is not None and not is_request_id(key):
        raise invalid([Violation(_KEY, REQUEST_ID_RULE)])
    return key
