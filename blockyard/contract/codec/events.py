"""Encodes and decodes the events of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.sampling import decode_prediction, decode_reason, encode_prediction, encode_reason
from blockyard.contract.events import (
    Accepted,
    Delta,
    Finished,
    Loading,
    PromptLogprobs,
    Recovered,
    TokenLogprob,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from blockyard.contract.sampling import FinishReason
from blockyard.errors import from_status, to_status
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.events import Event


def encode_event(event: Event, seq: int) -> inference_pb2.GenerationEvent:
    if isinstance(event, Delta):
        return inference_pb2.GenerationEvent(seq=seq, delta=_encode_delta(event))
    if isinstance(event, Accepted):
        return inference_pb2.GenerationEvent(seq=seq, accepted=encode_accepted(event))
    if isinstance(event, Recovered):
        return inference_pb2.GenerationEvent(seq=seq, recovered=_encode_recovered(event))
    if isinstance(event, Loading):
        return inference_pb2.GenerationEvent(seq=seq, loading=inference_pb2.Loading(message=event.message))
    if isinstance(event, PromptLogprobs):
        return inference_pb2.GenerationEvent(seq=seq, prompt_logprobs=encode_prompt_logprobs(event))
    return inference_pb2.GenerationEvent(seq=seq, finished=encode_finished(event))


def decode_event(message: inference_pb2.GenerationEvent) -> Event | None:
    """Decodes an event; None for one that this version does not know."""
    match message.WhichOneof("event"):
        case "delta":
            return _decode_delta(message.delta)
        case "accepted":
            return _decode_accepted(message.accepted)
        case "finished":
            return _decode_finished(message.finished)
        case "recovered":
            recovered = message.recovered
            return Recovered(recovered.cause, recovered.num_replayed_tokens, recovered.exact)
        case "loading":
            return Loading(message.loading.message)
        case "prompt_logprobs":
            return PromptLogprobs(_decode_logprobs(message.prompt_logprobs.logprobs))
        case _:
            return None


def encode_accepted(event: Accepted) -> inference_pb2.Accepted:
    return inference_pb2.Accepted(
        request_id=event.request_id,
        num_prompt_tokens=event.num_prompt_tokens,
        seed=event.seed,
        model=event.model,
        warnings=event.warnings,
        weight_version=event.weight_version,
    )


def _decode_accepted(message: inference_pb2.Accepted) -> Accepted:
    return Accepted(
        message.request_id,
        message.num_prompt_tokens,
        message.seed,
        message.model,
        tuple(message.warnings),
        message.weight_version,
    )


def _encode_delta(event: Delta) -> inference_pb2.Delta:
    delta = inference_pb2.Delta(
        index=event.index, text=event.text, num_tokens=event.num_tokens, num_text_bytes=event.num_text_bytes
    )
    # Few deltas have any of these, and each field that is named takes time.
    if event.token_ids:
        delta.token_ids.extend(event.token_ids)
    if event.logprobs:
        delta.logprobs.extend(map(encode_logprobs, event.logprobs))
    if event.reasoning_text:
        delta.reasoning_text = event.reasoning_text
    if event.tool_calls:
        delta.tool_calls.extend(map(_encode_call_delta, event.tool_calls))
    return delta


def _decode_delta(message: inference_pb2.Delta) -> Delta:
    return Delta(
        message.index,
        message.text,
        tuple(message.token_ids),
        message.num_tokens,
        message.num_text_bytes,
        _decode_logprobs(message.logprobs),
        message.reasoning_text,
        tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls),
    )


def _encode_call_delta(call: ToolCallDelta) -> inference_pb2.ToolCallDelta:
    return inference_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def encode_prompt_logprobs(event: PromptLogprobs) -> inference_pb2.PromptLogprobs:
    return inference_pb2.PromptLogprobs(logprobs=map(encode_logprobs, event.logprobs))


def encode_logprobs(logprobs: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    chosen = _encode_logprob(logprobs.chosen) if logprobs.chosen else None
    return inference_pb2.TokenLogprobs(chosen=chosen, top=map(_encode_logprob, logprobs.top))


def _decode_logprobs(places: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            _decode_logprob(place.chosen) if place.HasField("chosen") else None,
            tuple(map(_decode_logprob, place.top)),
        )
        for place in places
    )


def _encode_logprob(token: TokenLogprob) -> inference_pb2.TokenLogprob:
    return inference_pb2.TokenLogprob(token_id=token.token_id, text=token.text, logprob=token.logprob, rank=token.rank)


def _decode_logprob(message: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.text, message.logprob, message.rank)


def _encode_recovered(event: Recovered) -> inference_pb2.Recovered:
    return inference_pb2.Recovered(cause=event.cause, num_replayed_tokens=event.num_replayed_tokens, exact=event.exact)


def encode_usage(usage: Usage) -> sampling_pb2.Usage:
    return sampling_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_virtual_tokens=usage.num_virtual_tokens,
        prediction=None if usage.prediction is None else encode_prediction(usage.prediction),
    )


def decode_usage(message: sampling_pb2.Usage) -> Usage:
    return Usage(
        message.num_prompt_tokens,
        message.num_cached_tokens,
        message.num_completion_tokens,
        message.num_virtual_tokens,
        decode_prediction(message.prediction) if message.HasField("prediction") else None,
    )


def encode_finished(event: Finished) -> inference_pb2.Finished:
    matched = None
    if isinstance(event.matched_stop, str):
        matched = inference_pb2.MatchedStop(stop_string=event.matched_stop)
    elif event.matched_stop is not None:
        matched = inference_pb2.MatchedStop(stop_token_id=event.matched_stop)
    return inference_pb2.Finished(
        index=event.index,
        reason=encode_reason(event.finish_reason),
        matched_stop=matched,
        usage=encode_usage(event.usage),
        determinism_id=event.determinism_id,
        score=event.score,
        calls_tools=event.calls_tools,
        error=to_status(event.error) if event.error else None,
        weight_versions=[
            inference_pb2.WeightVersion(first_token=place, version=version) for place, version in event.weight_versions
        ],
    )


def _decode_finished(message: inference_pb2.Finished) -> Finished:
    kind = message.matched_stop.WhichOneof("stop")
    return Finished(
        message.index,
        decode_reason(message.reason) or FinishReason.ERROR,
        None if kind is None else getattr(message.matched_stop, kind),
        decode_usage(message.usage),
        message.determinism_id,
        message.score if message.HasField("score") else None,
        from_status(message.error) if message.HasField("error") else None,
        tuple((each.first_token, each.version) for each in message.weight_versions),
        message.calls_tools,
    )
