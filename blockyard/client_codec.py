"""Turns options into the public API's messages, and its messages into values. Does no I/O, so both clients share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.inference.v1 import inference_pb2
from blockyard.results import (
    Accepted,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerationOptions,
    Model,
    Recovered,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPEC_FIELDS = ("request_id", "model", "n", "return_token_ids", "skip_special_tokens")
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_STOP_FIELDS = (
    *("max_tokens", "min_tokens", "stop_strings", "stop_token_ids"),
    *("ignore_eos", "include_stop_in_output"),
)
_FINISH_REASON = {
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    sampling_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def make_spec(prompt: str | Sequence[int], options: GenerationOptions) -> inference_pb2.GenerationSpec:
    """Makes a request. An option that is None counts as absent.

    Raises TypeError for an option with an unknown name, and BlockyardError (FIELD_INVALID) with a violation for every
    value that its field cannot hold. All other checks are the gateway's.
    """
    given = {name: value for name, value in cast("dict[str, Any]", options).items() if value is not None}
    if unknown := sorted(set(given) - GenerationOptions.__optional_keys__):
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    if "stop" in given:
        stop = given.pop("stop")
        given["stop_strings"] = [stop] if isinstance(stop, str) else stop
    spec = inference_pb2.GenerationSpec()
    violations = [
        *(_set(spec, name, given, "") for name in _SPEC_FIELDS),
        *(_set(spec.sampling, name, given, "sampling.") for name in _SAMPLING_FIELDS),
        *(_set(spec.stop, name, given, "stop.") for name in _STOP_FIELDS),
        _set(spec, "text", {"text": prompt}, "")
        if isinstance(prompt, str)
        else _set(spec.token_ids, "ids", {"ids": prompt}, "token_ids."),
    ]
    if wrong := [violation for violation in violations if violation is not None]:
        raise invalid(wrong)
    if not isinstance(prompt, str):
        # An empty list is a prompt too, for the gateway to refuse.
        spec.token_ids.SetInParent()
    return spec


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


class EventReader:
    """Reads the messages of one stream in order, and checks that none is missing."""

    def __init__(self, num_sequences: int) -> None:
        self._next_seq = 0
        self._num_unfinished = num_sequences

    def read(self, response: inference_pb2.StreamGenerateResponse) -> Event:
        """Decodes the next message. Raises BlockyardError (BUG) when messages were lost."""
        seq = response.event.seq
        if seq != self._next_seq:
            raise BlockyardError(Reason.BUG, f"events were lost: seq {seq} came, {self._next_seq} was due")
        self._next_seq += 1
        event = to_event(response.event)
        self._num_unfinished -= isinstance(event, Finished)
        return event

    def end(self) -> None:
        """Takes an OK end of the stream. Raises BlockyardError (BUG) when a sequence had not finished."""
        if self._num_unfinished > 0:
            raise BlockyardError(Reason.BUG, f"the stream ended before {self._num_unfinished} of its sequences")


def to_event(event: inference_pb2.GenerationEvent) -> Event:
    """Decodes an event. Raises BlockyardError (BUG) for one that this version does not know."""
    match event.WhichOneof("event"):
        case "accepted":
            return to_accepted(event.accepted)
        case "delta":
            delta = event.delta
            return Delta(delta.index, delta.text, tuple(delta.token_ids), delta.num_tokens, delta.num_text_bytes)
        case "finished":
            return to_finished(event.finished)
        case "recovered":
            recovered = event.recovered
            return Recovered(recovered.cause, recovered.num_replayed_tokens, recovered.exact)
        case _:
            raise BlockyardError(Reason.BUG, "an event came that this version of the client does not know")


def to_accepted(accepted: inference_pb2.Accepted) -> Accepted:
    """Decodes the acceptance of a request."""
    return Accepted(accepted.request_id, accepted.num_prompt_tokens, accepted.seed, accepted.model)


def to_finished(finished: inference_pb2.Finished) -> Finished:
    """Decodes the end of a sequence."""
    return Finished(
        finished.index,
        _FINISH_REASON.get(finished.reason, FinishReason.ERROR),
        _matched_stop(finished.matched_stop),
        Usage(finished.usage.num_prompt_tokens, finished.usage.num_cached_tokens, finished.usage.num_completion_tokens),
        finished.determinism_id,
    )


def _matched_stop(matched: inference_pb2.MatchedStop) -> str | int | None:
    kind = matched.WhichOneof("stop")
    return None if kind is None else getattr(matched, kind)


def to_completion(response: inference_pb2.GenerateResponse) -> Completion:
    """Decodes a whole answer."""
    accepted = to_accepted(response.accepted)
    choices = tuple(to_choice(choice) for choice in response.choices)
    determinism_id = response.choices[0].finished.determinism_id if response.choices else ""
    return Completion(accepted.request_id, accepted.model, accepted.seed, choices, determinism_id)


def to_choice(choice: inference_pb2.Choice) -> Choice:
    """Decodes one sequence of a whole answer."""
    end = to_finished(choice.finished)
    return Choice(choice.index, choice.text, tuple(choice.token_ids), end.finish_reason, end.matched_stop, end.usage)


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
        )
        for model in response.models
    ]
