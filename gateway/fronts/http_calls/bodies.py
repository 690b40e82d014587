"""Reads the headers and the JSON bodies of calls, and reports all violations of a body in one error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from starlette.exceptions import HTTPException

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.headers import TENANT_KEY
from gateway.call_context import check_tenant
from gateway.fronts.http_calls.body_types import UNSUPPORTED, Shape
from gateway.fronts.http_calls.streaming import read_body
from gateway.request import REQUEST_ID_RULE, is_request_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import Request


B = TypeVar("B", bound=Shape)

# The field of a violation that concerns the whole body.
BODY = "body"
MAX_VIOLATIONS = 100
MAX_VALUES = 2**18
"""The most values of a body. In a body with long lists of texts or token ids, only lists and objects count."""
_KEY = "Idempotency-Key"
# The header that all clients of Anthropic's API send.
ANTHROPIC_VERSION = "anthropic-version"


def read_tenant(request: Request) -> str:
    """Returns the tenant of a call; raises BlockyardError FIELD_INVALID or PERMISSION_DENIED."""
    return check_tenant(request.headers.get(TENANT_KEY))


def read_key(request: Request) -> str | None:
    """Reads the Idempotency-Key, which becomes the call's request id; raises BlockyardError FIELD_INVALID."""
    key = request.headers.get(_KEY)
    if key is not None and not is_request_id(key):
        raise invalid([Violation(_KEY, REQUEST_ID_RULE)])
    return key


async def read_json(request: Request) -> bytes:
    """Reads a body of the content type JSON; raises BlockyardError, and HTTPException 415 for another type.

    Other types are refused because browsers let any web page send them to any address, even to local ones, without a
    CORS preflight request.
    """
    raw = await read_body(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be JSON, and the header Content-Type must be application/json")
    return raw


def parse_body(kind: type[B], raw: bytes) -> B:
    """Parses a JSON body; raises BlockyardError with all violations of names and types."""
    if _has_too_many_values(raw, b"[{" if kind.HAS_LONG_LISTS else b"[{,"):
        raise invalid([Violation(BODY, f"has more than {MAX_VALUES} values")])
    try:
        return kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise from_validation(error) from None


def _has_too_many_values(raw: bytes, marks: bytes) -> bool:
    """Returns whether JSON has too many values: parsing them would block the event loop.

    `marks`: the characters that begin or separate values.
    """
    # Most large bodies are mainly one text, which is parsed fast.
    if len(raw) <= MAX_VALUES or not _has_more(raw, marks):
        return False
    # Do not count marks inside strings: if the body is split at quotes, every second part is a string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if b"," in marks and plain.count(b'"') > 2 * MAX_VALUES:
        return True
    return _has_more(b"".join(plain.split(b'"')[::2]), marks)


def _has_more(raw: bytes, marks: bytes) -> bool:
    """Returns whether there are more than MAX_VALUES marks. If marks are rare, `find` is faster than `count`."""
    count = 0
    for mark in marks:
        place = raw.find(mark)
        while place >= 0 and count <= MAX_VALUES:
            count += 1
            place = raw.find(mark, place + 1)
    return count > MAX_VALUES


def from_validation(error: pydantic.ValidationError) -> BlockyardError:
    """Returns one error with all violations of a body's names and types, a hundred at most."""
    return of_details(error.errors(include_url=False, include_context=False, include_input=False))


def of_details(found: Sequence[Mapping[str, Any]], *, skip: int = 0) -> BlockyardError:
    """Returns one error for pydantic's error details, without the first `skip` parts of their locations."""
    return invalid(_violation(item["type"], item["loc"][skip:], item["msg"]) for item in found[:MAX_VIOLATIONS])


def _is_tag(part: int | str) -> bool:
    """Returns whether a part of a location is pydantic's own tag (`[key]`, a union's type), not a field of the body."""
    return isinstance(part, str) and part.startswith("[") and part.endswith("]")


def _violation(kind: str, location: tuple[int | str, ...], message: str) -> Violation:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if not _is_tag(part))[1:]
    if kind == UNSUPPORTED:
        return Violation(name, message, Reason.UNSUPPORTED_PARAMETER)
    descriptions = {"extra_forbidden": "is not a parameter of this call", "missing": "is required"}
    description = descriptions.get(kind, message.removeprefix("Input ").strip())
    return Violation(name or BODY, description)
