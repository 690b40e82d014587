"""Encodes and decodes the state that another gateway needs to continue a request.

The scheduler keeps this state as bytes that it does not read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import DecodeError

from blockyard.contract.codec.request import decode_spec, encode_options
from blockyard.contract.codec.scheduling import decode_submission
from blockyard.contract.request import OnUpdate
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import BlockyardError, Reason
from blockyard.gateway.v1 import state_pb2
from gateway.dialects.answer_parser import ParsingRule, ToolSchema
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from blockyard.contract.scheduling import Submission

# Fields that may differ if the same request is sent again, such as its times, its trace and its prompt's form.
_NOT_ASKED = frozenset(
    (
        "max_queue_seconds",
        "remaining_seconds",
        "trace_context",
        "gateway_state",
        "digest",
        "lora",
        "prompt",
        "front_state",
        "warnings",
        "cache_salt",
    )
)


def with_state(submission: Submission, request: GenerationRequest) -> Submission:
    """Adds the state of the original request to its submission, and the digest of both."""
    # Leave out fields that the submission itself has.
    bare = replace(
        request,
        model="",
        sampling=SamplingParams(),
        n=1,
        priority=0,
        max_queue_seconds=None,
        beam_search=None,
        format=None,
        on_update=OnUpdate.CONTINUE,
        cache_salt="",
    )
    state = state_pb2.RequestState(
        spec=encode_options(bare),
        front_state=request.front_state,
        warnings=request.warnings,
        parsing=_encode_parsing(request.parsing) if request.parsing else None,
    )
    # Only the adapter's name counts: a request that is sent again is the same even if its adapter was replaced.
    lora_name = submission.lora.name if submission.lora else ""
    digest = digest_of(submission, bare, lora_name, without=_NOT_ASKED)
    return replace(submission, gateway_state=state.SerializeToString(), digest=digest)


def digest_of(*parts: object, without: frozenset[str] = frozenset()) -> bytes:
    """Returns the SHA-256 of some values. Dataclasses count by their named fields, except the fields in `without`.

    A field with its default value does not count, so that fields which a later version adds do not change digests.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(_canonical(part, without)).encode())
    return digest.digest()


def _canonical(value: Any, without: frozenset[str] = frozenset()) -> object:
    """Turns a value into tuples and plain values, whose `repr` does not depend on the order of a mapping."""
    if isinstance(value, Enum):
        return cast("object", value.value)
    if is_dataclass(value):
        pairs = (
            (name, getattr(value, name), default) for name, default in _defaults(type(value)) if name not in without
        )
        return tuple((name, _canonical(each)) for name, each, default in pairs if each != default)
    if isinstance(value, Mapping):
        return tuple(sorted(cast("Mapping[Any, Any]", value).items()))
    if isinstance(value, array):
        return cast("array[Any]", value).tobytes()
    if isinstance(value, tuple | list):
        return tuple(map(_canonical, cast("tuple[Any, ...]", value)))
    return value


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    return tuple(
        (each.name, each.default_factory() if each.default_factory is not MISSING else each.default)
        for each in fields(kind)
    )


def _encode_parsing(rule: ParsingRule) -> state_pb2.AnswerParsing:
    parsing = state_pb2.AnswerParsing(
        dialect=rule.dialect, one_tool_call=rule.one_call, must_call=rule.must_call, is_limited=rule.is_limited
    )
    for tool in rule.tools:
        parsing.tools.add(name=tool.name, parameters=tool.parameters, strict=tool.strict)
    return parsing


def _decode_parsing(parsing: state_pb2.AnswerParsing) -> ParsingRule:
    tools = tuple(ToolSchema(tool.name, tool.parameters, tool.strict) for tool in parsing.tools)
    return ParsingRule(parsing.dialect, tools, parsing.one_tool_call, parsing.must_call, parsing.is_limited)


def read_submission(encoded: bytes) -> Submission:
    """Decodes a submission that some gateway sent; raises BlockyardError BUG for bytes that no gateway sends."""
    try:
        return decode_submission(encoded)
    except DecodeError:
        raise BlockyardError(Reason.BUG, "the submission that the scheduler kept cannot be decoded") from None


def request_of(submission: Submission) -> GenerationRequest:
    """Returns the original request of a submission, with its prompt as ids and its defaults filled in.

    Raises BlockyardError BUG for a state that no gateway writes.
    """
    try:
        state = state_pb2.RequestState.FromString(submission.gateway_state)
    except DecodeError:
        raise BlockyardError(
            Reason.BUG, "the state of the request that another gateway wrote cannot be decoded"
        ) from None
    return replace(
        decode_spec(state.spec, GenerationRequest),
        prompt=tuple(submission.prompt_token_ids),
        model=submission.lora.name if submission.lora else "",
        sampling=submission.sampling,
        n=submission.n,
        tenant=submission.tenant,
        priority=submission.priority,
        max_queue_seconds=submission.max_queue_seconds,
        beam_search=submission.beam_search,
        on_update=OnUpdate.FAIL if submission.fails_on_update else OnUpdate.CONTINUE,
        front_state=state.front_state,
        warnings=tuple(state.warnings),
        parsing=_decode_parsing(state.parsing) if state.HasField("parsing") else None,
    )
