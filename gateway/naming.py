"""Names of requests and tenants, and what a request of a tenant is called between gateways and scheduler."""

from __future__ import annotations

import re

from blockyard.errors import Violation, invalid

# Metadata over gRPC, a header over HTTP.
TENANT_KEY = "x-blockyard-tenant"
REQUEST_ID_RULE = "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -"
REQUEST_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"
TENANT_PATTERN = r"[A-Za-z0-9._-]{1,64}"
_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_TENANT = re.compile(TENANT_PATTERN)


def is_request_id(name: str) -> bool:
    """Whether a client may call a request so."""
    return _REQUEST_ID.fullmatch(name) is not None


def check_request_id(name: str) -> None:
    """Raises BlockyardError FIELD_INVALID for what is no request's name."""
    if not is_request_id(name):
        raise invalid([Violation("request_id", REQUEST_ID_RULE)])


def check_tenant(name: str | None) -> str:
    """Reads the tenant that a call is for; none is the empty name. Raises BlockyardError FIELD_INVALID."""
    if name is None:
        return ""
    if _TENANT.fullmatch(name) is None:
        raise invalid([Violation(TENANT_KEY, "must be 1 to 64 characters of A-Z a-z 0-9 . _ -")])
    return name


def wire_id(tenant: str, request_id: str) -> str:
    """The name of a request for the scheduler: request ids belong to a tenant, whose name has no slash in it."""
    return f"{tenant}/{request_id}" if tenant else request_id
