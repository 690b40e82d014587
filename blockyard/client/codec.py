"""Builds the public API's requests from a client's options. Does no I/O, so both clients share it.

Refuses only values that the API's protobuf messages cannot hold: the gateway checks the rest.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from blockyard.client.chat import ChatOptions, Messages
from blockyard.client.chat_codec import WRONG, find_chat_violations, problem_of, read_conversation
from blockyard.client.results import GenerationOptions, StructuredOutputsParams
from blockyard.contract.codec.request import encode_spec
from blockyard.contract.request import (
    Choices,
    GenerationSpec,
    JsonObject,
    JsonSchema,
    Lark,
    OnDisconnect,
    OnUpdate,
    Regex,
)
from blockyard.contract.sampling import SamplingParams, StopCriteria
from blockyard.errors import Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from enum import StrEnum

    from blockyard.contract.chat import Conversation
    from blockyard.contract.request import OutputFormat
    from blockyard.inference.v1 import inference_pb2

Member = TypeVar("Member", bound="StrEnum")

# These options have the names of the fields; the excluded ones are converted separately.
_SPEC = frozenset(field.name for field in fields(GenerationSpec)) - {"stop", "on_disconnect", "on_update"}
_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_STOP = frozenset(field.name for field in fields(StopCriteria))


def make_spec(prompt: str | Sequence[int], options: GenerationOptions) -> inference_pb2.GenerationSpec:
    """Builds a request. An option that is None counts as absent.

    Raises TypeError for an unknown option, and BlockyardError (FIELD_INVALID) with a violation for every value that its
    field cannot hold. The gateway makes all other checks.
    """
    given = _given(options, GenerationOptions.__optional_keys__)
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    try:
        return _encode(prompt, given)
    except WRONG:
        violations = list(_find_violations(given))
    if problem := problem_of(_encode, prompt, {}):
        violations.append(Violation("token_ids.ids", f"{prompt!r:.100}: {problem}"))
    raise invalid(violations)


def make_chat_spec(messages: Messages, options: ChatOptions) -> inference_pb2.GenerationSpec:
    """Builds a request whose prompt is a conversation; raises the errors of `make_spec`."""
    if isinstance(messages, str):
        raise TypeError('messages must be a list: use [Message("user", text)]')
    given, messages = _given(options, ChatOptions.__optional_keys__), list(messages)
    try:
        spec = _encode(read_conversation(messages, given), given)
    except WRONG:
        raise invalid([*_find_violations(given), *find_chat_violations(messages, given)]) from None
    if given.get("add_special_tokens"):
        # Send it though it is the default: the gateway refuses it beside a conversation.
        spec.add_special_tokens = True
    return spec


def _given(options: GenerationOptions, known: frozenset[str]) -> dict[str, Any]:
    given = {name: value for name, value in cast("dict[str, Any]", options).items() if value is not None}
    if unknown := sorted(set(given) - known):
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    return given


def _find_violations(given: Mapping[str, Any]) -> Iterator[Violation]:
    """Encodes each option by itself; yields a violation for each that cannot be encoded."""
    for name, value in given.items():
        if problem := problem_of(_encode, "", {name: value}):
            yield Violation(_place_of(name), f"{value!r:.100}: {problem}")


def _place_of(name: str) -> str:
    if name == "stop":
        return "stop.stop_strings"
    return f"sampling.{name}" if name in _SAMPLING else f"stop.{name}" if name in _STOP else name


def _encode(prompt: str | tuple[int, ...] | Conversation, given: Mapping[str, Any]) -> inference_pb2.GenerationSpec:
    """Encodes a request; raises one of WRONG for a value that its field cannot hold."""
    if isinstance(given.get("bad_words"), str):
        # A string is a sequence too: each character would become a word.
        raise TypeError("bad_words must be a list of texts")
    stop = given.get("stop", ())
    spec = GenerationSpec(
        prompt,
        sampling=SamplingParams(**_pick(_SAMPLING, given)),
        stop=StopCriteria(stop_strings=(stop,) if isinstance(stop, str) else stop, **_pick(_STOP, given)),
        on_disconnect=_read_member(OnDisconnect, given.get("on_disconnect", OnDisconnect.KEEP)),
        on_update=_read_member(OnUpdate, given.get("on_update", OnUpdate.CONTINUE)),
        max_queue_seconds=given.get("max_queue_time"),
        format=_read_format(given["structured_outputs"]) if "structured_outputs" in given else None,
        **_pick(_SPEC, given),
    )
    return encode_spec(spec)


def _pick(names: frozenset[str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _read_member(kind: type[Member], name: str) -> Member:
    try:
        return kind(name)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(kind)}") from None


def _read_format(params: StructuredOutputsParams) -> OutputFormat:
    given = [params.json is not None, params.regex is not None, params.choice is not None, params.grammar is not None]
    if sum(given) + params.json_object != 1:
        raise ValueError("must be one of json, regex, choice, grammar and json_object")
    if isinstance(params.choice, str):
        # A string is a sequence too: each character would become a choice.
        raise TypeError("choice must be a list of texts")
    if params.json is not None:
        schema = params.json if isinstance(params.json, str) else json.dumps(params.json, ensure_ascii=False)
        return JsonSchema(schema, params.disable_any_whitespace)
    if params.regex is not None:
        return Regex(params.regex)
    if params.choice is not None:
        return Choices(tuple(params.choice))
    if params.grammar is not None:
        return Lark(params.grammar)
    return JsonSchema('{"type": "object"}', compact=True) if params.disable_any_whitespace else JsonObject()
