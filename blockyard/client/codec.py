"""Turns options into the public API's messages, and its messages into values. Does no I/O, so both clients share it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from blockyard.client import chat_codec
from blockyard.client.chat import ChatOptions
from blockyard.client.results import (
    Accepted,
    BeamSearch,
    Delta,
    EarlyStopping,
    Event,
    Finished,
    FinishReason,
    GenerationOptions,
    Model,
    PromptLogprobs,
    Recovered,
    StructuredOutputsParams,
    TokenLogprob,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from blockyard.common.v1 import sampling_pb2
from blockyard.errors import Violation, from_status, invalid
from blockyard.inference.v1 import inference_pb2
from blockyard.pooling.tasks import find_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from blockyard.client.chat import Messages

_SPEC_FIELDS = (
    *("request_id", "model", "n", "return_token_ids", "skip_special_tokens", "priority"),
    *("add_special_tokens", "truncate_prompt_tokens"),
)
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs"),
)
_STOP_FIELDS = (
    *("max_tokens", "min_tokens", "stop_strings", "stop_token_ids"),
    *("ignore_eos", "include_stop_in_output"),
)
_ON_DISCONNECT = {"abort": inference_pb2.ON_DISCONNECT_ABORT, "keep": inference_pb2.ON_DISCONNECT_KEEP}
_ON_UPDATE = {"continue": inference_pb2.ON_UPDATE_CONTINUE, "fail": inference_pb2.ON_UPDATE_FAIL}
# The enums of the API are strings, so that users may write and compare them as such; their names are the contract's.
_EARLY_STOPPING = {each: sampling_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{each.name}") for each in EarlyStopping}
_FINISH_REASON = {sampling_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}"): each for each in FinishReason}


def make_spec(prompt: str | Sequence[int], options: GenerationOptions) -> inference_pb2.GenerationSpec:
    """Makes a request. An option that is None counts as absent.

    Raises TypeError for an option with an unknown name, and BlockyardError (FIELD_INVALID) with a violation for every
    value that its field cannot hold. All other checks are the gateway's.
    """
    spec = inference_pb2.GenerationSpec()
    violations = _fill(spec, _given(options, GenerationOptions.__optional_keys__))
    if isinstance(prompt, str):
        violations.append(_set(spec, "text", {"text": prompt}, ""))
    else:
        # An empty list is a prompt too, for the gateway to refuse.
        spec.token_ids.SetInParent()
        violations.append(_set(spec.token_ids, "ids", {"ids": prompt}, "token_ids."))
    _raise_any(violations)
    return spec


def make_chat_spec(messages: Messages, options: ChatOptions) -> inference_pb2.GenerationSpec:
    """Makes a request whose prompt is a conversation; raises as `make_spec` does."""
    spec = inference_pb2.GenerationSpec()
    given = _given(options, ChatOptions.__optional_keys__)
    encoded = chat_codec.encode(messages, given)
    _raise_any([*_fill(spec, given), *encoded.violations])
    spec.conversation.CopyFrom(encoded.conversation)
    return spec


def _given(options: GenerationOptions, known: frozenset[str]) -> dict[str, Any]:
    given = {name: value for name, value in cast("dict[str, Any]", options).items() if value is not None}
    if unknown := sorted(set(given) - known):
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    return given


def _fill(spec: inference_pb2.GenerationSpec, given: dict[str, Any]) -> list[Violation | None]:
    """Puts options into a request, all but its prompt; returns a violation for each that does not fit."""
    if "stop" in given:
        stop = given.pop("stop")
        given["stop_strings"] = [stop] if isinstance(stop, str) else stop
    return [
        *(_set(spec, name, given, "") for name in _SPEC_FIELDS),
        *(_set(spec.sampling, name, given, "sampling.") for name in _SAMPLING_FIELDS),
        *(_set(spec.stop, name, given, "stop.") for name in _STOP_FIELDS),
        *(_put(spec, name, given, put) for name, put in _PUT.items()),
    ]


def _raise_any(violations: Iterable[Violation | None]) -> None:
    if wrong := [violation for violation in violations if violation is not None]:
        raise invalid(wrong)


def _set(message: Any, name: str, given: dict[str, Any], prefix: str) -> Violation | None:
    """Sets a field from the value of the same name, if there is one."""
    if name not in given:
        return None
    value = given[name]
    try:
        if isinstance(value, str | bool | int | float):
            setattr(message, name, value)
        elif hasattr(value, "items"):
            getattr(message, name).update(value)
        else:
            getattr(message, name).extend(value)
    except (TypeError, ValueError, AttributeError) as error:
        return Violation(prefix + name, f"{value!r:.100}: {error}")
    return None


def _put(
    spec: inference_pb2.GenerationSpec, name: str, given: dict[str, Any], put: Callable[[Any, Any], None]
) -> Violation | None:
    """Puts an option into the spec whose field has another form."""
    if name not in given:
        return None
    try:
        put(spec, given[name])
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
        return Violation(name, f"{given[name]!r:.100}: {error}")
    return None


def _put_on_disconnect(spec: inference_pb2.GenerationSpec, value: str) -> None:
    if value not in _ON_DISCONNECT:
        raise ValueError(f"it is one of {', '.join(_ON_DISCONNECT)}")
    spec.on_disconnect = _ON_DISCONNECT[value]


def _put_on_update(spec: inference_pb2.GenerationSpec, value: str) -> None:
    if value not in _ON_UPDATE:
        raise ValueError(f"it is one of {', '.join(_ON_UPDATE)}")
    spec.on_update = _ON_UPDATE[value]


def _put_max_queue_time(spec: inference_pb2.GenerationSpec, seconds: float) -> None:
    spec.max_queue_time.FromNanoseconds(int(seconds * 1e9))


def _put_beam_search(spec: inference_pb2.GenerationSpec, search: BeamSearch) -> None:
    spec.beam_search.width = search.width
    spec.beam_search.length_penalty = search.length_penalty
    spec.beam_search.early_stopping = _EARLY_STOPPING[EarlyStopping(search.early_stopping)]


def _put_structured_outputs(spec: inference_pb2.GenerationSpec, params: StructuredOutputsParams) -> None:
    given = [params.json is not None, params.regex is not None, params.choice is not None, params.grammar is not None]
    if sum(given) + params.json_object != 1:
        raise ValueError("it is one of json, regex, choice, grammar and json_object")
    if isinstance(params.choice, str):
        # Its characters would be the choices.
        raise TypeError("choice is a list of texts")
    if params.json is not None:
        schema = params.json if isinstance(params.json, str) else json.dumps(params.json, ensure_ascii=False)
        spec.format.json_schema.schema = schema
        spec.format.json_schema.compact = params.disable_any_whitespace
    elif params.regex is not None:
        spec.format.regex = params.regex
    elif params.choice is not None:
        spec.format.choices.SetInParent()
        spec.format.choices.texts.extend(params.choice)
    elif params.grammar is not None:
        spec.format.grammar = params.grammar
    elif params.disable_any_whitespace:
        spec.format.json_schema.schema = '{"type": "object"}'
        spec.format.json_schema.compact = True
    else:
        spec.format.json_object = True


_PUT = {
    "on_disconnect": _put_on_disconnect,
    "on_update": _put_on_update,
    "max_queue_time": _put_max_queue_time,
    "beam_search": _put_beam_search,
    "structured_outputs": _put_structured_outputs,
}


def to_event(event: inference_pb2.GenerationEvent) -> Event | None:
    """Decodes an event; None for one that this version does not know."""
    match event.WhichOneof("event"):
        case "accepted":
            return to_accepted(event.accepted)
        case "prompt_logprobs":
            return PromptLogprobs(_to_logprobs(event.prompt_logprobs.logprobs))
        case "delta":
            return to_delta(event.delta)
        case "finished":
            return to_finished(event.finished)
        case "recovered":
            recovered = event.recovered
            return Recovered(recovered.cause, recovered.num_replayed_tokens, recovered.exact)
        case _:
            return None


def to_accepted(accepted: inference_pb2.Accepted) -> Accepted:
    """Decodes the acceptance of a request."""
    return Accepted(
        accepted.request_id,
        accepted.num_prompt_tokens,
        accepted.seed,
        accepted.model,
        tuple(accepted.warnings),
        accepted.weight_version,
    )


def to_delta(delta: inference_pb2.Delta) -> Delta:
    """Decodes more of a sequence."""
    token_ids, logprobs = tuple(delta.token_ids), _to_logprobs(delta.logprobs)
    calls = tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in delta.tool_calls)
    return Delta(
        delta.index,
        delta.text,
        token_ids,
        delta.num_tokens,
        delta.num_text_bytes,
        logprobs,
        delta.reasoning_text,
        calls,
    )


def _to_logprobs(places: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            _to_logprob(place.chosen) if place.HasField("chosen") else None,
            tuple(_to_logprob(token) for token in place.top),
        )
        for place in places
    )


def _to_logprob(token: inference_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.text, token.logprob, token.rank)


def _to_usage(usage: sampling_pb2.Usage) -> Usage:
    return Usage(
        usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens, usage.num_virtual_tokens
    )


def to_finished(finished: inference_pb2.Finished) -> Finished:
    """Decodes the end of a sequence."""
    return Finished(
        finished.index,
        _FINISH_REASON.get(finished.reason, FinishReason.ERROR),
        _matched_stop(finished.matched_stop),
        _to_usage(finished.usage),
        finished.determinism_id,
        finished.score if finished.HasField("score") else None,
        from_status(finished.error) if finished.HasField("error") else None,
        tuple((each.first_token, each.version) for each in finished.weight_versions),
        finished.calls_tools,
    )


def _matched_stop(matched: inference_pb2.MatchedStop) -> str | int | None:
    kind = matched.WhichOneof("stop")
    return None if kind is None else getattr(matched, kind)


def to_cancelled(response: inference_pb2.CancelGenerateResponse) -> list[str]:
    """Decodes the ids of requests that were running, and of those that end should they come."""
    return [*response.cancelled_request_ids, *response.pending_request_ids]


def to_models(response: inference_pb2.ListModelsResponse) -> list[Model]:
    """Decodes the models that are served."""
    return [
        Model(
            model.name,
            model.max_model_len,
            model.vocab_size,
            model.has_chat_template,
            model.determinism_id,
            model.batch_invariant,
            model.parent,
            find_task(model.task).label,
            model.embedding_size,
            tuple(model.warnings),
            model.dialect,
        )
        for model in response.models
    ]
