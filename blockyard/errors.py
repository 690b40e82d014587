"""The error table: each reason's gRPC code and HTTP status, and the conversion to and from google.rpc.Status.

Both fronts and the client library use `TABLE`; nothing else maps an error to a code.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message

from blockyard.google_rpc import error_details_pb2, status_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


DOMAIN = "blockyard"
# Proxies and libraries limit trailers to about 8 KiB; the status stays well below.
MAX_STATUS_BYTES = 4096
# gRPC sends the message a second time, percent-encoded: up to three bytes for each.
MAX_MESSAGE_BYTES = 1024
MAX_DESCRIPTION_BYTES = 256
MAX_METADATA_ENTRIES = 8
MAX_QUOTED_CHARACTERS = 128
MAX_METADATA_BYTES = 64
# The metadata key under which gRPC's libraries look for the status with details.
DETAILS_KEY = "grpc-status-details-bin"
TRANSPORT_ORIGIN = {"origin": "transport"}
# Metadata of NO_READY_WORKER if the scheduler has just started and may yet be sent the request by a gateway.
NOT_HEARD_OF = {"request": "not heard of yet"}


class Reason(StrEnum):
    """Why something failed: `ErrorInfo.reason`, and `error.reason` over HTTP."""

    FIELD_INVALID = "FIELD_INVALID"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    UNSUPPORTED_PARAMETER = "UNSUPPORTED_PARAMETER"
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_EXPIRED = "REQUEST_EXPIRED"
    REQUEST_ID_CONFLICT = "REQUEST_ID_CONFLICT"
    MODEL_NOT_LOADED = "MODEL_NOT_LOADED"
    FEATURE_DISABLED = "FEATURE_DISABLED"
    WRONG_STATE = "WRONG_STATE"
    NO_TOKEN_POSSIBLE = "NO_TOKEN_POSSIBLE"
    GRAMMAR_DEAD_END = "GRAMMAR_DEAD_END"
    QUEUE_FULL = "QUEUE_FULL"
    TOKEN_BACKLOG = "TOKEN_BACKLOG"
    TENANT_QUOTA = "TENANT_QUOTA"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    NEVER_FITS = "NEVER_FITS"
    CLIENT_CANCELLED = "CLIENT_CANCELLED"
    POISON_REQUEST = "POISON_REQUEST"
    NOT_FINITE = "NOT_FINITE"
    BUG = "BUG"
    EXTENSION_FAILED = "EXTENSION_FAILED"
    NO_READY_WORKER = "NO_READY_WORKER"
    DRAINING = "DRAINING"
    SLEEPING = "SLEEPING"
    GROUP_BROKEN = "GROUP_BROKEN"
    QUEUE_DEADLINE = "QUEUE_DEADLINE"
    GENERATION_DEADLINE = "GENERATION_DEADLINE"
    OPERATION_DEADLINE = "OPERATION_DEADLINE"


class Rule(NamedTuple):
    """The gRPC code and the HTTP status of a reason."""

    code: grpc.StatusCode
    http_status: int


TABLE: Mapping[Reason, Rule] = {
    Reason.FIELD_INVALID: Rule(grpc.StatusCode.INVALID_ARGUMENT, 400),
    Reason.PROMPT_TOO_LONG: Rule(grpc.StatusCode.INVALID_ARGUMENT, 400),
    Reason.UNSUPPORTED_PARAMETER: Rule(grpc.StatusCode.INVALID_ARGUMENT, 400),
    Reason.GRAMMAR_TOO_COMPLEX: Rule(grpc.StatusCode.INVALID_ARGUMENT, 400),
    Reason.UNAUTHENTICATED: Rule(grpc.StatusCode.UNAUTHENTICATED, 401),
    Reason.PERMISSION_DENIED: Rule(grpc.StatusCode.PERMISSION_DENIED, 403),
    Reason.MODEL_NOT_FOUND: Rule(grpc.StatusCode.NOT_FOUND, 404),
    Reason.REQUEST_EXPIRED: Rule(grpc.StatusCode.NOT_FOUND, 404),
    Reason.REQUEST_ID_CONFLICT: Rule(grpc.StatusCode.ALREADY_EXISTS, 409),
    Reason.MODEL_NOT_LOADED: Rule(grpc.StatusCode.FAILED_PRECONDITION, 412),
    Reason.FEATURE_DISABLED: Rule(grpc.StatusCode.FAILED_PRECONDITION, 412),
    Reason.WRONG_STATE: Rule(grpc.StatusCode.FAILED_PRECONDITION, 412),
    Reason.NO_TOKEN_POSSIBLE: Rule(grpc.StatusCode.FAILED_PRECONDITION, 412),
    Reason.GRAMMAR_DEAD_END: Rule(grpc.StatusCode.FAILED_PRECONDITION, 412),
    Reason.QUEUE_FULL: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Reason.TOKEN_BACKLOG: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Reason.TENANT_QUOTA: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Reason.MESSAGE_TOO_LARGE: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    Reason.NEVER_FITS: Rule(grpc.StatusCode.RESOURCE_EXHAUSTED, 400),
    Reason.CLIENT_CANCELLED: Rule(grpc.StatusCode.CANCELLED, 499),
    Reason.POISON_REQUEST: Rule(grpc.StatusCode.INTERNAL, 500),
    Reason.NOT_FINITE: Rule(grpc.StatusCode.INTERNAL, 500),
    Reason.BUG: Rule(grpc.StatusCode.INTERNAL, 500),
    Reason.EXTENSION_FAILED: Rule(grpc.StatusCode.INTERNAL, 500),
    Reason.NO_READY_WORKER: Rule(grpc.StatusCode.UNAVAILABLE, 503),
    Reason.DRAINING: Rule(grpc.StatusCode.UNAVAILABLE, 503),
    Reason.SLEEPING: Rule(grpc.StatusCode.FAILED_PRECONDITION, 412),
    Reason.GROUP_BROKEN: Rule(grpc.StatusCode.UNAVAILABLE, 503),
    Reason.QUEUE_DEADLINE: Rule(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    Reason.GENERATION_DEADLINE: Rule(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    Reason.OPERATION_DEADLINE: Rule(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
}

# Reasons for errors of the transport itself, which have no details.
_REASON_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: Reason.FIELD_INVALID,
    grpc.StatusCode.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.MESSAGE_TOO_LARGE,
    grpc.StatusCode.UNAVAILABLE: Reason.NO_READY_WORKER,
    grpc.StatusCode.CANCELLED: Reason.CLIENT_CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: Reason.FEATURE_DISABLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.GENERATION_DEADLINE,
}
_STATUS_CODE = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Violation:
    """One invalid field of a request: its path in the proto (`sampling.top_p`), and what it should be."""

    field: str
    description: str
    reason: Reason = Reason.FIELD_INVALID


@dataclass
class BlockyardError(Exception):
    """An error with a reason. The only exception that crosses a service boundary, on either side.

    `retry_after_seconds` is set if the same request may succeed later. `metadata` holds a few short facts;
    `TRANSPORT_ORIGIN` in it marks an error that no Blockyard service sent, such as a refused connection.
    """

    reason: Reason
    message: str
    violations: tuple[Violation, ...] = ()
    retry_after_seconds: float | None = None
    metadata: dict[str, str] = field(default_factory=dict[str, str])

    # A dataclass that compares by value has no hash by default, but libraries keep exceptions in sets.
    def __hash__(self) -> int:
        return hash((self.reason, self.message))

    def __post_init__(self) -> None:
        # Every field: copying and unpickling call the class with `args`.
        self.args = (self.reason, self.message, self.violations, self.retry_after_seconds, self.metadata)

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def code(self) -> grpc.StatusCode:
        return TABLE[self.reason].code

    @property
    def http_status(self) -> int:
        return TABLE[self.reason].http_status


def invalid(violations: Iterable[Violation]) -> BlockyardError:
    """Combines violations into one error. The first violation's reason is the error's."""
    listed = tuple(violations)
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in listed)
    return BlockyardError(listed[0].reason, message, listed)


def quote(text: str) -> str:
    """Quotes a name that a caller sent, for a message; long names are cut."""
    return repr(text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}…")


def is_unknown_request(error: BlockyardError) -> bool:
    """Returns whether an error means that the requested id is unknown, or not known yet."""
    return error.reason is Reason.REQUEST_EXPIRED or NOT_HEARD_OF.items() <= error.metadata.items()


def to_status(error: BlockyardError) -> status_pb2.Status:
    """Encodes an error as google.rpc.Status below 4 KiB: cuts long texts, drops the last violations."""
    status = status_pb2.Status(code=error.code.value[0], message=_encodable(error.message, MAX_MESSAGE_BYTES))
    status.details.add().Pack(_error_info(error))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(max(0.0, error.retry_after_seconds) * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    # The bytes that are left, less the overhead of one more detail.
    bad_request = _bad_request(error.violations, MAX_STATUS_BYTES - status.ByteSize() - 64)
    if bad_request.field_violations:
        status.details.add().Pack(bad_request)
    return status


def _encodable(text: str, max_bytes: int) -> str:
    """Cuts a text, and replaces lone surrogates, which JSON may contain but UTF-8 may not."""
    return text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore")


def _error_info(error: BlockyardError) -> error_details_pb2.ErrorInfo:
    metadata = {
        _encodable(name, MAX_METADATA_BYTES): _encodable(value, MAX_METADATA_BYTES)
        for name, value in list(error.metadata.items())[:MAX_METADATA_ENTRIES]
        # Drop the mark: the service that passes the error on is one of Blockyard's.
        if name not in TRANSPORT_ORIGIN
    }
    return error_details_pb2.ErrorInfo(reason=str(error.reason), domain=DOMAIN, metadata=metadata)


def _bad_request(violations: Iterable[Violation], max_bytes: int) -> error_details_pb2.BadRequest:
    bad_request = error_details_pb2.BadRequest()
    for violation in violations:
        bad_request.field_violations.add(
            field=_encodable(violation.field, MAX_DESCRIPTION_BYTES),
            description=_encodable(violation.description, MAX_DESCRIPTION_BYTES),
            reason=str(violation.reason),
        )
        if bad_request.ByteSize() > max_bytes:
            del bad_request.field_violations[-1]
            break
    return bad_request


def from_status(status: status_pb2.Status) -> BlockyardError:
    """Decodes google.rpc.Status. Without Blockyard's details the reason follows from the code.

    Never fails: details that cannot be read are left out, and a long message is cut.
    """
    code = _STATUS_CODE.get(status.code, grpc.StatusCode.UNKNOWN)
    reason, metadata = _REASON_OF_CODE.get(code, Reason.BUG), dict(TRANSPORT_ORIGIN)
    violations: tuple[Violation, ...] = ()
    retry_after_seconds: float | None = None
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    for detail in status.details:
        if _unpack(detail, info) and info.domain == DOMAIN:
            reason, metadata = _known(info.reason, reason), dict(info.metadata)
        elif _unpack(detail, retry):
            retry_after_seconds = max(0.0, retry.retry_delay.ToNanoseconds() / 1e9)
        elif _unpack(detail, bad):
            violations = tuple(
                Violation(violation.field, violation.description, _known(violation.reason, Reason.FIELD_INVALID))
                for violation in bad.field_violations
            )
    return BlockyardError(reason, status.message[:MAX_STATUS_BYTES], violations, retry_after_seconds, metadata)


def _unpack(detail: any_pb2.Any, message: Message) -> bool:
    """Unpacks a detail into `message`; returns False if it is of another type or malformed."""
    try:
        return detail.Unpack(message)
    except DecodeError:
        return False


def _known(name: str, otherwise: Reason) -> Reason:
    """Returns the reason of a name, or `otherwise` for a newer server's unknown name."""
    return Reason(name) if name in Reason.__members__ else otherwise


# Phrases in gRPC's errors for calls that reach no Blockyard service, and advice for each.
_ADVICE = {
    "Method not found!": "the server is another service, or an older version",
    "http1.x server": "this is an HTTP port, use the gRPC port",
    "ALPN": "this is an HTTP port, use the gRPC port",
    "WRONG_VERSION_NUMBER": "the server has no TLS, connect without it (no --tls, no tls=True)",
    "CERTIFICATE_VERIFY_FAILED": "name the authority of the server's certificate (--tls-authority, ClientTls)",
    "Hostname Verification Check failed": "name the server as its certificate does (--tls-server-name, ClientTls)",
    ": Socket closed": "the server may ask for TLS, try --tls (tls=True)",
}


def from_rpc_error(error: grpc.RpcError) -> BlockyardError:
    """Decodes the error of a gRPC call, synchronous or asynchronous."""
    call = cast("Any", error)
    status = status_pb2.Status(code=call.code().value[0], message=call.details() or "")
    for name, value in call.trailing_metadata() or ():
        if name == DETAILS_KEY:
            # Ignore details that cannot be read, or that a proxy has made inconsistent with the status.
            with suppress(DecodeError):
                packed = status_pb2.Status.FromString(value)
                if (packed.code, packed.message) == (status.code, status.message):
                    return from_status(packed)
    status.message += next((f": {advice}" for said, advice in _ADVICE.items() if said in status.message), "")
    return from_status(status)


class CallStatus(NamedTuple):
    """A status for `abort_with_status`; see grpc.Status."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def to_call_status(error: BlockyardError) -> CallStatus:
    """Encodes an error that ends a call, also in the middle of a stream."""
    status = to_status(error)
    return CallStatus(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
