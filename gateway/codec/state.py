"""Encodes what another gateway needs to continue a request, as opaque bytes that the scheduler keeps, and decodes it.

Also makes the digest by which a request that is sent again is recognized.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from blockyard.errors import BlockyardError, Reason
from blockyard.gateway.v1 import state_pb2
from gateway.codec import public as codec
from gateway.codec import scheduler as scheduler_codec
from gateway.dialects.answer_parser import ParsingRule, ToolSchema
from gateway.request import GenerationRequest, OnUpdate, SamplingOptions
from gateway.scheduler_messages import Adapter

if TYPE_CHECKING:
    from gateway.scheduler_messages import Submission


def with_state(submission: Submission, request: GenerationRequest) -> Submission:
    """Adds to a submission the state of the request that it was made of, and the digest of both."""
    # What the submission itself says is not said again; how long a request may take is no part of what it asks.
    bare = replace(
        request,
        model="",
        sampling=SamplingOptions(),
        n=1,
        priority=0,
        max_queue_seconds=None,
        beam_search=None,
        format=None,
        on_update=OnUpdate.CONTINUE,
    )
    state = state_pb2.RequestState(
        spec=codec.encode_spec(bare),
        front_state=request.front_state,
        warnings=request.warnings,
        parsing=_encode_parsing(request.parsing) if request.parsing else None,
    )
    return replace(submission, gateway_state=state.SerializeToString(), body_digest=_digest(submission, state))


def _digest(submission: Submission, state: state_pb2.RequestState) -> bytes:
    # Sent again, a request is the same though its adapter was replaced meanwhile.
    named = submission.lora and Adapter(0, submission.lora.name, "", "")
    timeless = replace(
        submission, max_queue_seconds=None, remaining_seconds=None, gateway_state=b"", body_digest=b"", lora=named
    )
    asked = scheduler_codec.encode_submission(timeless).SerializeToString(deterministic=True)
    digest = hashlib.sha256(asked)
    digest.update(state.spec.SerializeToString(deterministic=True))
    digest.update(state.parsing.SerializeToString(deterministic=True))
    return digest.digest()


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


def request_of(submission: Submission) -> GenerationRequest:
    """Returns the request that a submission was made of: its prompt as ids, its defaults filled in.

    Raises BlockyardError BUG for a state that no gateway writes.
    """
    try:
        state = state_pb2.RequestState.FromString(submission.gateway_state)
    except DecodeError:
        raise BlockyardError(Reason.BUG, "what another gateway left of the request cannot be read") from None
    return replace(
        codec.decode_spec(state.spec),
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
