"""Decodes and encodes the public API's messages. A message never travels deeper than this module."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.errors import Reason, Violation, invalid, to_status
from blockyard.inference.v1 import inference_pb2
from gateway.codec.conversation import decode_conversation
from gateway.codec.formats import decode_format, encode_format
from gateway.codec.sampling import decode_beams, decode_sampling, encode_beams, encode_reason, encode_sampling
from gateway.request import (
    Accepted,
    Delta,
    Finished,
    GenerationRequest,
    OnDisconnect,
    OnUpdate,
    Position,
    PromptLogprobs,
    Recovered,
    ResumeRequest,
    StopOptions,
    merge_calls,
)
from gateway.validation import MAX_N

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.chat import Conversation
    from gateway.dialects.answer_parser import ToolCallDelta
    from gateway.request import Event, ModelCard, TokenLogprob, TokenLogprobs

_ON_DISCONNECT_NUMBERS = {
    OnDisconnect.ABORT: inference_pb2.ON_DISCONNECT_ABORT,
    OnDisconnect.KEEP: inference_pb2.ON_DISCONNECT_KEEP,
}

# What is the default is not written.
_ON_UPDATE_NUMBERS = {
    OnUpdate.CONTINUE: inference_pb2.ON_UPDATE_UNSPECIFIED,
    OnUpdate.FAIL: inference_pb2.ON_UPDATE_FAIL,
}


def decode_spec(spec: inference_pb2.GenerationSpec) -> GenerationRequest:
    """Reads a request; a prompt that is absent becomes an empty text."""
    return GenerationRequest(
        prompt=_decode_prompt(spec),
        request_id=spec.request_id,
        model=spec.model,
        sampling=decode_sampling(spec.sampling),
        stop=_decode_stop(spec.stop),
        n=spec.n if spec.HasField("n") else 1,
        return_token_ids=spec.return_token_ids,
        skip_special_tokens=spec.skip_special_tokens if spec.HasField("skip_special_tokens") else True,
        add_special_tokens=spec.add_special_tokens if spec.HasField("add_special_tokens") else True,
        truncate_prompt_tokens=spec.truncate_prompt_tokens if spec.HasField("truncate_prompt_tokens") else None,
        on_disconnect=(
            OnDisconnect.KEEP if spec.on_disconnect == inference_pb2.ON_DISCONNECT_KEEP else OnDisconnect.ABORT
        ),
        on_update=OnUpdate.FAIL if spec.on_update == inference_pb2.ON_UPDATE_FAIL else OnUpdate.CONTINUE,
        priority=spec.priority,
        max_queue_seconds=spec.max_queue_time.ToNanoseconds() / 1e9 if spec.HasField("max_queue_time") else None,
        beam_search=decode_beams(spec.beam_search) if spec.HasField("beam_search") else None,
        format=decode_format(spec.format) if spec.HasField("format") else None,
    )


def decode_generation(spec: inference_pb2.GenerationSpec) -> GenerationRequest:
    """Reads a request of Generate and StreamGenerate.

    Raises BlockyardError FIELD_INVALID for a conversation, and for values that no enum has.
    """
    if spec.HasField("conversation"):
        raise invalid([Violation("conversation", "is for Chat and StreamChat")])
    _check_enums(spec)
    return decode_spec(spec)


def decode_chat(spec: inference_pb2.GenerationSpec) -> GenerationRequest:
    """Reads a request of Chat and StreamChat. A conversation that is absent becomes an empty one.

    Raises BlockyardError FIELD_INVALID for any other prompt, and for values that no enum has.
    """
    _check_enums(spec)
    kind = spec.WhichOneof("prompt")
    if kind in ("text", "token_ids"):
        raise invalid([Violation(kind, "is for Generate and StreamGenerate")])
    if spec.add_special_tokens:
        description = "is not supported: the chat template has put special tokens where they belong"
        raise invalid([Violation("add_special_tokens", description, Reason.UNSUPPORTED_PARAMETER)])
    request = decode_spec(spec)
    return request if kind else replace(request, prompt=decode_conversation(spec.conversation))


def _check_enums(spec: inference_pb2.GenerationSpec) -> None:
    """Refuses enum numbers of a later version: read as a default, they would change an answer silently."""
    violations: list[Violation] = []
    if spec.on_disconnect not in inference_pb2.OnDisconnect.values():
        violations.append(Violation("on_disconnect", "must be ABORT or KEEP"))
    if spec.on_update not in inference_pb2.OnUpdate.values():
        violations.append(Violation("on_update", "must be CONTINUE or FAIL"))
    if spec.beam_search.early_stopping not in sampling_pb2.EarlyStopping.values():
        violations.append(Violation("beam_search.early_stopping", "must be HEURISTIC, FIRST or NEVER"))
    if spec.HasField("format") and decode_format(spec.format) is None:
        violations.append(Violation("format", "must be one of those that there are"))
    if violations:
        raise invalid(violations)


def decode_tokenize(message: inference_pb2.TokenizeRequest) -> GenerationRequest:
    """Reads a prompt to tokenize, as a request; raises BlockyardError FIELD_INVALID for two prompts."""
    if message.HasField("conversation"):
        if message.text:
            raise invalid([Violation("text", "must be absent beside a conversation")])
        return GenerationRequest(decode_conversation(message.conversation), model=message.model)
    add = message.add_special_tokens if message.HasField("add_special_tokens") else True
    return GenerationRequest(message.text, model=message.model, add_special_tokens=add)


def _decode_prompt(spec: inference_pb2.GenerationSpec) -> str | tuple[int, ...] | Conversation:
    match spec.WhichOneof("prompt"):
        case "token_ids":
            return tuple(spec.token_ids.ids[:])
        case "conversation":
            return decode_conversation(spec.conversation)
        case _:
            return spec.text


def _decode_stop(message: sampling_pb2.StopCriteria) -> StopOptions:
    return StopOptions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids[:]),
        ignore_eos=message.ignore_eos,
        include_stop_in_output=message.include_stop_in_output,
    )


def decode_resume(message: inference_pb2.ResumeGenerateRequest) -> ResumeRequest:
    """Reads a request to resume; raises BlockyardError FIELD_INVALID for a message that contradicts itself."""
    if len(message.positions) > MAX_N:
        raise invalid([Violation("positions", f"at most {MAX_N}, not {len(message.positions)}")])
    indexes = [position.index for position in message.positions]
    violations = [
        Violation(f"positions[{index}].index", "is there twice") for index in set(indexes) if indexes.count(index) > 1
    ]
    request = None
    if message.HasField("spec"):
        _check_enums(message.spec)
        request = decode_spec(message.spec)
        if request.request_id not in ("", message.request_id):
            violations.append(Violation("spec.request_id", f"must be {message.request_id!r}, as request_id is"))
        request = replace(request, request_id=message.request_id)
        if message.HasField("seed") and request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=message.seed))
    if violations:
        raise invalid(violations)
    positions = {position.index: _decode_position(position) for position in message.positions}
    return ResumeRequest(message.request_id, positions=positions, request=request)


def _decode_position(message: inference_pb2.Position) -> Position:
    return Position(message.num_tokens, message.num_text_bytes, message.finished, tuple(message.token_ids[:]))


def encode_spec(request: GenerationRequest) -> inference_pb2.GenerationSpec:
    """Writes a request without its prompt and the options of that; `decode_spec` reads it back."""
    spec = inference_pb2.GenerationSpec(
        request_id=request.request_id,
        model=request.model,
        sampling=encode_sampling(request.sampling),
        stop=_encode_stop(request.stop),
        n=request.n,
        return_token_ids=request.return_token_ids,
        skip_special_tokens=request.skip_special_tokens,
        on_disconnect=_ON_DISCONNECT_NUMBERS[request.on_disconnect],
        on_update=_ON_UPDATE_NUMBERS[request.on_update],
        priority=request.priority,
        beam_search=encode_beams(request.beam_search) if request.beam_search else None,
        format=encode_format(request.format) if request.format else None,
    )
    if request.max_queue_seconds is not None:
        spec.max_queue_time.FromNanoseconds(round(request.max_queue_seconds * 1e9))
    return spec


def _encode_stop(options: StopOptions) -> sampling_pb2.StopCriteria:
    return sampling_pb2.StopCriteria(
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop_strings=options.stop_strings,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        include_stop_in_output=options.include_stop_in_output,
    )


def encode_event(event: Event, seq: int) -> inference_pb2.GenerationEvent:
    """Writes one event of a stream."""
    if isinstance(event, Delta):
        return inference_pb2.GenerationEvent(seq=seq, delta=_encode_delta(event))
    if isinstance(event, Accepted):
        return inference_pb2.GenerationEvent(seq=seq, accepted=encode_accepted(event))
    if isinstance(event, Recovered):
        return inference_pb2.GenerationEvent(seq=seq, recovered=_encode_recovered(event))
    if isinstance(event, PromptLogprobs):
        return inference_pb2.GenerationEvent(seq=seq, prompt_logprobs=encode_prompt_logprobs(event))
    return inference_pb2.GenerationEvent(seq=seq, finished=_encode_finished(event))


def encode_accepted(event: Accepted) -> inference_pb2.Accepted:
    """Writes the event of a queued request."""
    return inference_pb2.Accepted(
        request_id=event.request_id,
        num_prompt_tokens=event.num_prompt_tokens,
        seed=event.seed,
        model=event.model,
        warnings=event.warnings,
        weight_version=event.weight_version,
    )


def _encode_delta(event: Delta) -> inference_pb2.Delta:
    delta = inference_pb2.Delta(
        index=event.index, text=event.text, num_tokens=event.num_tokens, num_text_bytes=event.num_text_bytes
    )
    # Few deltas have any of these, and each field that is named takes time.
    if event.token_ids:
        delta.token_ids.extend(event.token_ids)
    if event.logprobs:
        delta.logprobs.extend(map(_encode_token_logprobs, event.logprobs))
    if event.reasoning_text:
        delta.reasoning_text = event.reasoning_text
    if event.tool_calls:
        delta.tool_calls.extend(map(_encode_call_delta, event.tool_calls))
    return delta


def _encode_call_delta(call: ToolCallDelta) -> inference_pb2.ToolCallDelta:
    return inference_pb2.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)


def encode_prompt_logprobs(event: PromptLogprobs) -> inference_pb2.PromptLogprobs:
    """Writes the log probabilities of a prompt."""
    return inference_pb2.PromptLogprobs(logprobs=map(_encode_token_logprobs, event.logprobs))


def _encode_token_logprobs(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    chosen = _encode_token_logprob(logprobs.chosen) if logprobs.chosen else None
    return inference_pb2.TokenLogprobs(chosen=chosen, top=map(_encode_token_logprob, logprobs.top))


def _encode_token_logprob(token: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(token_id=token.token_id, text=token.text, logprob=token.logprob, rank=token.rank)


def _encode_recovered(event: Recovered) -> inference_pb2.Recovered:
    return inference_pb2.Recovered(cause=event.cause, num_replayed_tokens=event.num_replayed_tokens, exact=event.exact)


def _encode_finished(event: Finished) -> inference_pb2.Finished:
    matched = None
    if isinstance(event.matched, str):
        matched = inference_pb2.MatchedStop(stop_string=event.matched)
    elif event.matched is not None:
        matched = inference_pb2.MatchedStop(stop_token_id=event.matched)
    return inference_pb2.Finished(
        index=event.index,
        reason=encode_reason(event.reason),
        matched_stop=matched,
        usage=sampling_pb2.Usage(
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
            num_completion_tokens=event.num_completion_tokens,
            num_virtual_tokens=event.num_virtual_tokens,
        ),
        determinism_id=event.determinism_id,
        score=event.score,
        calls_tools=event.calls_tools,
        error=to_status(event.error) if event.error else None,
        weight_versions=[
            inference_pb2.WeightVersion(first_token=place, version=version) for place, version in event.weight_versions
        ],
    )


def encode_choice(deltas: Sequence[Delta], finished: Finished) -> inference_pb2.Choice:
    """Writes a whole sequence."""
    return inference_pb2.Choice(
        index=finished.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finished=_encode_finished(finished),
        logprobs=[_encode_token_logprobs(entry) for delta in deltas for entry in delta.logprobs],
        tool_calls=[
            inference_pb2.ToolCall(id=call.call_id, name=call.name, arguments=call.arguments)
            for call in merge_calls(deltas)
        ],
        reasoning_text="".join(delta.reasoning_text for delta in deltas),
    )


def encode_model(card: ModelCard) -> inference_pb2.Model:
    """Writes a model."""
    return inference_pb2.Model(
        name=card.name,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        has_chat_template=card.has_chat_template,
        determinism_id=card.determinism_id,
        batch_invariant=card.batch_invariant,
        dialect=card.dialect,
        parent=card.parent,
        task=pooling_pb2.Task.ValueType(card.task),
        embedding_size=card.embedding_size,
        warnings=card.warnings,
    )
