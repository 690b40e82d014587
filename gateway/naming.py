"""Checks the names of requests and tenants, and joins them to a request's name on the wire."""

from __future__ import annotations

import re

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.headers import TENANT_KEY, TENANT_PATTERN
from blockyard.security.authentication import CALLER

REQUEST_ID_RULE = "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
REQUEST_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_TENANT = re.compile(TENANT_PATTERN)


def is_request_id(name: str) -> bool:
    """Returns whether a client may give a request this name."""
    return _REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises BlockyardError FIELD_INVALID for a name that a request cannot have."""
    if not is_request_id(name):
        raise invalid([Violation("request_id", REQUEST_ID_RULE)])


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


def wire_id(tenant: str, request_id: str) -> str:
    """Returns the name of a request for the scheduler: the tenant, whose name has no slash in it, and its id."""
    return f"{tenant}/{request_id}" if tenant else request_id
