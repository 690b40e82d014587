"""Decodes the public API's requests, and refuses messages that are never valid. Encodes choices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.chat import decode_conversation, encode_call
from blockyard.contract.codec.events import encode_finished, encode_logprobs
from blockyard.contract.codec.messages import decode_seconds
from blockyard.contract.codec.request import decode_format, decode_position, decode_spec
from blockyard.contract.events import Delta, Finished, join_calls
from blockyard.errors import Reason, Violation, invalid
from blockyard.inference.v1 import inference_pb2
from gateway.pooling_calls import CallOptions, ClassifyCall, EmbedCall, Input, ScoreCall
from gateway.request import GenerationRequest, ResumeRequest
from gateway.validation import MAX_N

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def decode_embed(message: inference_pb2.EmbedRequest, tenant: str, remaining_seconds: float | None) -> EmbedCall:
    return EmbedCall(
        _decode_options(message.spec, tenant, remaining_seconds),
        _decode_inputs(message.inputs),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalise=message.normalise if message.HasField("normalise") else True,
        prompt_name=message.prompt_name if message.HasField("prompt_name") else None,
    )


def decode_score(message: inference_pb2.ScoreRequest, tenant: str, remaining_seconds: float | None) -> ScoreCall:
    """Decodes a call for scores; raises BlockyardError FIELD_INVALID if it has no query."""
    if not message.HasField("query"):
        raise invalid([Violation("query", "is required")])
    return ScoreCall(
        _decode_options(message.spec, tenant, remaining_seconds),
        _decode_inputs([message.query]),
        _decode_inputs(message.documents),
        instruction=message.instruction,
        top_n=message.top_n if message.HasField("top_n") else None,
    )


def decode_classify(
    message: inference_pb2.ClassifyRequest, tenant: str, remaining_seconds: float | None
) -> ClassifyCall:
    options = _decode_options(message.spec, tenant, remaining_seconds)
    return ClassifyCall(options, _decode_inputs(message.inputs), raw=message.raw)


def _decode_options(spec: inference_pb2.PoolingSpec, tenant: str, remaining_seconds: float | None) -> CallOptions:
    return CallOptions(
        request_id=spec.request_id,
        model=spec.model,
        tenant=tenant,
        priority=spec.priority,
        max_queue_seconds=decode_seconds(spec, "max_queue_time"),
        remaining_seconds=remaining_seconds,
        truncate_prompt_tokens=spec.truncate_prompt_tokens if spec.HasField("truncate_prompt_tokens") else None,
        add_special_tokens=spec.add_special_tokens if spec.HasField("add_special_tokens") else True,
    )


def _decode_inputs(messages: Iterable[inference_pb2.PoolingInput]) -> tuple[Input, ...]:
    """Decodes inputs; an input without content becomes an empty text."""
    return tuple(
        tuple(message.token_ids.ids[:]) if message.HasField("token_ids") else message.text for message in messages
    )


def decode_generation(spec: inference_pb2.GenerationSpec) -> GenerationRequest:
    """Decodes a request of Generate and StreamGenerate.

    Raises BlockyardError FIELD_INVALID for a conversation, and for unknown enum values.
    """
    if spec.HasField("conversation"):
        raise invalid([Violation("conversation", "is allowed only in Chat and StreamChat")])
    _check_enums(spec)
    return decode_spec(spec, GenerationRequest)


def decode_chat(spec: inference_pb2.GenerationSpec) -> GenerationRequest:
    """Decodes a request of Chat and StreamChat. A missing conversation becomes an empty one.

    Raises BlockyardError FIELD_INVALID for any other prompt, and for unknown enum values.
    """
    _check_enums(spec)
    kind = spec.WhichOneof("prompt")
    if kind in ("text", "token_ids"):
        raise invalid([Violation(kind, "is allowed only in Generate and StreamGenerate")])
    if spec.add_special_tokens:
        description = "is not supported for conversations: the chat template places the special tokens"
        raise invalid([Violation("add_special_tokens", description, Reason.UNSUPPORTED_PARAMETER)])
    request = decode_spec(spec, GenerationRequest)
    return request if kind else replace(request, prompt=decode_conversation(spec.conversation))


def _check_enums(spec: inference_pb2.GenerationSpec) -> None:
    """Refuses enum values of a later version: reading them as the default would change an answer silently."""
    violations: list[Violation] = []
    if spec.on_disconnect not in inference_pb2.OnDisconnect.values():
        violations.append(Violation("on_disconnect", "must be ABORT or KEEP"))
    if spec.on_update not in inference_pb2.OnUpdate.values():
        violations.append(Violation("on_update", "must be CONTINUE or FAIL"))
    if spec.beam_search.early_stopping not in sampling_pb2.EarlyStopping.values():
        violations.append(Violation("beam_search.early_stopping", "must be HEURISTIC, FIRST or NEVER"))
    if spec.HasField("format") and decode_format(spec.format) is None:
        violations.append(Violation("format", "must be json_schema, json_object, regex, choices or grammar"))
    if violations:
        raise invalid(violations)


def decode_tokenize(message: inference_pb2.TokenizeRequest) -> GenerationRequest:
    """Decodes a prompt to tokenize as a request; raises BlockyardError FIELD_INVALID for two prompts."""
    if message.HasField("conversation"):
        if message.text:
            raise invalid([Violation("text", "must be empty beside a conversation")])
        return GenerationRequest(decode_conversation(message.conversation), model=message.model)
    add = message.add_special_tokens if message.HasField("add_special_tokens") else True
    return GenerationRequest(message.text, model=message.model, add_special_tokens=add)


def decode_resume(message: inference_pb2.ResumeGenerateRequest) -> ResumeRequest:
    """Decodes a request to resume; raises BlockyardError FIELD_INVALID for a message that contradicts itself."""
    if len(message.positions) > MAX_N:
        raise invalid([Violation("positions", f"must have at most {MAX_N} entries, not {len(message.positions)}")])
    indexes = [position.index for position in message.positions]
    violations = [
        Violation(f"positions[{index}].index", "is given twice") for index in set(indexes) if indexes.count(index) > 1
    ]
    request = None
    if message.HasField("spec"):
        _check_enums(message.spec)
        request = decode_spec(message.spec, GenerationRequest)
        if request.request_id not in ("", message.request_id):
            violations.append(Violation("spec.request_id", f"must equal request_id, {message.request_id!r}"))
        request = replace(request, request_id=message.request_id)
        if message.HasField("seed") and request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=message.seed))
    if violations:
        raise invalid(violations)
    positions = {position.index: decode_position(position) for position in message.positions}
    return ResumeRequest(message.request_id, positions=positions, request=request)


def encode_choice(deltas: Sequence[Delta], finished: Finished) -> inference_pb2.Choice:
    return inference_pb2.Choice(
        index=finished.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finished=encode_finished(finished),
        logprobs=[encode_logprobs(entry) for delta in deltas for entry in delta.logprobs],
        tool_calls=map(encode_call, join_calls(deltas)),
        reasoning_text="".join(delta.reasoning_text for delta in deltas),
    )
