"""Reads the headers and the JSON bodies of calls, and makes one error of all that is wrong with a body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from starlette.exceptions import HTTPException

from blockyard.errors import Reason, Violation, invalid
from blockyard.headers import TENANT_KEY
from gateway.call_context import check_tenant
from gateway.fronts.http_calls.body_types import UNSUPPORTED, Shape
from gateway.fronts.http_calls.streaming import read_body
from gateway.request import REQUEST_ID_RULE, is_request_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import Request

    from blockyard.errors import BlockyardError

B = TypeVar("B", bound=Shape)

# The place of a violation of the whole body, which has no parameter.
BODY = "body"
MAX_VIOLATIONS = 100
MAX_VALUES = 2**18
"""The values of a body; of one with long lists of texts or token ids, its lists and objects."""
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


async def read_json(request: Request) -> bytes:
    """Reads a body of the type JSON; raises BlockyardError, and HTTPException 415.

    Browsers let any web page send other types to any address without asking, this machine's own included.
    """
    raw = await read_body(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, "the body must be JSON, and the header Content-Type must be application/json")
    return raw


def parse_body(kind: type[B], raw: bytes) -> B:
    """Reads JSON; raises BlockyardError with all that is wrong with its names and types."""
    if _has_too_many_values(raw, b"[{" if kind.HAS_LONG_LISTS else b"[{,"):
        raise invalid([Violation(BODY, f"has more than {MAX_VALUES} values")])
    try:
        return kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise from_validation(error) from None


def _has_too_many_values(raw: bytes, marks: bytes) -> bool:
    """Returns whether JSON has more values than are read while everybody waits: `marks` begin or divide them."""
    # Most bodies of this size are one text, which is read in no time.
    if len(raw) <= MAX_VALUES or not _has_more(raw, marks):
        return False
    # Marks inside texts do not count. Quotes divide the body: every second part is a text.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if b"," in marks and plain.count(b'"') > 2 * MAX_VALUES:
        return True
    return _has_more(b"".join(plain.split(b'"')[::2]), marks)


def _has_more(raw: bytes, marks: bytes) -> bool:
    """Returns whether there are more than MAX_VALUES marks. Where there are few, `find` is faster than `count`."""
    count = 0
    for mark in marks:
        place = raw.find(mark)
        while place >= 0 and count <= MAX_VALUES:
            count += 1
            place = raw.find(mark, place + 1)
    return count > MAX_VALUES


def from_validation(error: pydantic.ValidationError) -> BlockyardError:
    """Makes one error of everything that is wrong with a body's names and types, up to a hundred violations."""
    return of_details(error.errors(include_url=False, include_context=False, include_input=False))


def of_details(found: Sequence[Mapping[str, Any]], *, skip: int = 0) -> BlockyardError:
    """Makes one error of pydantic's details; the first `skip` parts of their places are left out."""
    return invalid(_violation(item["type"], item["loc"][skip:], item["msg"]) for item in found[:MAX_VIOLATIONS])


def _is_tag(part: int | str) -> bool:
    """Returns whether a part of a place is none of the body: of a key, or of a shape in a union."""
    return isinstance(part, str) and part.startswith("[") and part.endswith("]")


def _violation(kind: str, location: tuple[int | str, ...], message: str) -> Violation:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if not _is_tag(part))[1:]
    if kind == UNSUPPORTED:
        return Violation(name, message, Reason.UNSUPPORTED_PARAMETER)
    descriptions = {"extra_forbidden": "is not a parameter of this call", "missing": "is required"}
    description = descriptions.get(kind, message.removeprefix("Input ").strip())
    return Violation(name or BODY, description)
