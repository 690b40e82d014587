"""The error table against the design, and google.rpc.Status there and back."""

from __future__ import annotations

import copy
import pickle

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from blockyard.errors import (
    MAX_STATUS_BYTES,
    TABLE,
    TRANSPORT_ORIGIN,
    BlockyardError,
    Reason,
    Violation,
    from_status,
    invalid,
    to_status,
)

# As the design lists them: code, HTTP status, reasons.
DESIGN = """
INVALID_ARGUMENT 400 FIELD_INVALID PROMPT_TOO_LONG UNSUPPORTED_PARAMETER GRAMMAR_TOO_COMPLEX
UNAUTHENTICATED 401 UNAUTHENTICATED
PERMISSION_DENIED 403 PERMISSION_DENIED
NOT_FOUND 404 MODEL_NOT_FOUND REQUEST_EXPIRED
ALREADY_EXISTS 409 REQUEST_ID_CONFLICT
FAILED_PRECONDITION 412 MODEL_NOT_LOADED FEATURE_DISABLED SLEEPING WRONG_STATE NO_TOKEN_POSSIBLE GRAMMAR_DEAD_END
RESOURCE_EXHAUSTED 429 QUEUE_FULL TOKEN_BACKLOG TENANT_QUOTA
RESOURCE_EXHAUSTED 413 MESSAGE_TOO_LARGE
RESOURCE_EXHAUSTED 400 NEVER_FITS
CANCELLED 499 CLIENT_CANCELLED
INTERNAL 500 POISON_REQUEST NOT_FINITE BUG EXTENSION_FAILED
UNAVAILABLE 503 NO_READY_WORKER DRAINING GROUP_BROKEN
DEADLINE_EXCEEDED 504 QUEUE_DEADLINE GENERATION_DEADLINE OPERATION_DEADLINE
"""
TEXT = st.text(max_size=3000)


def test_the_table_is_the_designs() -> None:
    rows = [line.split() for line in DESIGN.strip().splitlines()]
    designed = {reason: (code, int(http)) for code, http, *reasons in rows for reason in reasons}
    assert {str(reason): (rule.code.name, rule.http_status) for reason, rule in TABLE.items()} == designed


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_in_the_table_and_round_trips(reason: Reason) -> None:
    error = BlockyardError(reason, "why", (Violation("n", "too many"),), 1.5, {"limit": "64"})
    status = to_status(error)
    assert status.code == code_pb2.Code.Value(error.code.name)
    assert from_status(status) == error
    assert error.http_status == TABLE[reason].http_status
    assert str(error) == f"{reason}: why"


def test_a_violation_keeps_its_own_reason() -> None:
    error = invalid([Violation("sampling.top_p", "0 < top_p <= 1"), Violation("best_of", "no", Reason("BUG"))])
    assert error.reason is Reason.FIELD_INVALID
    assert error.message == "sampling.top_p: 0 < top_p <= 1; best_of: no"
    assert from_status(to_status(error)).violations == error.violations


violations = st.builds(Violation, TEXT, TEXT, st.sampled_from(Reason))


@given(
    st.builds(
        BlockyardError,
        st.sampled_from(Reason),
        TEXT,
        st.lists(violations, max_size=40).map(tuple),
        st.none() | st.floats(min_value=0, max_value=1e6),
        st.dictionaries(TEXT, TEXT, max_size=20),
    )
)
def test_a_status_is_small_whatever_is_in_it(error: BlockyardError) -> None:
    status = to_status(error)
    assert len(status.SerializeToString()) <= MAX_STATUS_BYTES
    back = from_status(status)
    assert back.reason is error.reason
    assert error.message.startswith(back.message)
    assert len(back.violations) <= len(error.violations)


def test_the_first_violations_stay_when_there_are_too_many() -> None:
    told = tuple(Violation(f"field_{number}", "x" * 100) for number in range(1000))
    kept = from_status(to_status(invalid(told))).violations
    assert 10 < len(kept) < 100
    assert kept == told[: len(kept)]


def test_half_a_surrogate_pair_does_not_hide_the_error() -> None:
    error = invalid([Violation("stop", "\ud800 is no text")])
    assert from_status(to_status(error)).violations == (Violation("stop", "? is no text"),)


def test_a_negative_delay_becomes_none_at_all() -> None:
    assert (
        from_status(to_status(BlockyardError(Reason.DRAINING, "", retry_after_seconds=-1.0))).retry_after_seconds == 0
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.NO_READY_WORKER),
        (grpc.StatusCode.CANCELLED, Reason.CLIENT_CANCELLED),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.MESSAGE_TOO_LARGE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.GENERATION_DEADLINE),
        (grpc.StatusCode.UNIMPLEMENTED, Reason.FEATURE_DISABLED),
        (grpc.StatusCode.DATA_LOSS, Reason.BUG),
    ],
)
def test_a_status_of_the_transport_gets_a_reason_and_its_origin(code: grpc.StatusCode, reason: Reason) -> None:
    error = from_status(status_pb2.Status(code=code.value[0], message="gone"))
    assert (error.reason, error.message, error.metadata) == (reason, "gone", TRANSPORT_ORIGIN)


def test_the_origin_is_not_passed_on() -> None:
    error = from_status(status_pb2.Status(code=code_pb2.UNAVAILABLE))
    assert from_status(to_status(error)).metadata == {}


def test_a_reason_of_a_newer_server_is_read_by_its_code() -> None:
    status = to_status(BlockyardError(Reason.DRAINING, "later"))
    status.details[0].value = status.details[0].value.replace(b"DRAINING", b"MOVED_ON")
    assert from_status(status).reason is Reason.NO_READY_WORKER


def test_a_foreign_domain_is_not_ours() -> None:
    status = to_status(BlockyardError(Reason.DRAINING, "later"))
    status.details[0].value = status.details[0].value.replace(b"blockyard", b"elsewhere")
    assert from_status(status).reason is Reason.NO_READY_WORKER


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_loses_nothing(copied: object) -> None:
    error = BlockyardError(Reason.DRAINING, "later", (Violation("n", "no"),), 2.0, {"a": "b"})
    again = copied(error)  # type: ignore[operator]
    assert again == error
    assert len({again, error}) == 1


def test_whatever_a_peer_calls_a_status_becomes_an_error() -> None:
    status = status_pb2.Status(code=-5, message="x" * 10**6)
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
    status.details.add(type_url="no address", value=b"\x00")
    status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=-9)))
    error = from_status(status)
    assert (error.reason, error.retry_after_seconds) == (Reason.BUG, 0.0)
    assert len(error.message) == MAX_STATUS_BYTES
