"""The list of cases is complete: no field of the proto and no parameter of a body is left out."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from blockyard.inference.v1 import inference_pb2
from gateway.fronts.http_calls.body_types import Neutral, Shape
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from tests.unit.gateway.fronts.parity.asking import body_of, spec_of
from tests.unit.gateway.fronts.parity.case import COMMON
from tests.unit.gateway.fronts.parity.cases import BASES, FEATURES, cases_of
from tests.unit.gateway.fronts.parity.fronts import FRONTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

# Parameters that only a body has.
ONLY_HTTP = {
    "stream": "a call of its own over gRPC",
    "stream_options": "every stream over gRPC tells what it cost",
    "echo": "who sends a prompt has it",
    "return_tokens_as_token_ids": "over gRPC log probabilities have both",
    "max_completion_tokens": "another name of max_tokens",
    "documents": "over gRPC a variable of the template, as all others are",
    "reasoning_effort": "the same",
    "logprobs": "over gRPC how many, as top_logprobs",
    "response_format": "OpenAI's name of structured_outputs",
    "guided_choice": "another name of structured_outputs.choice",
    "guided_grammar": "another name of structured_outputs.grammar",
    "guided_json": "another name of structured_outputs.json",
    "guided_regex": "another name of structured_outputs.regex",
    "prediction": "over gRPC ids, as predicted_token_ids",
    "use_beam_search": "over gRPC there is a beam_search, or none",
    "include_reasoning": "over gRPC reasoning has a field of its own",
}

# A part of a content is joined before its shape is looked at.
TEXT_PART: dict[str, set[str]] = {"messages": {"type", "text"}, "tools": set()}


def set_fields(message: Message) -> Iterator[FieldDescriptor]:
    """The fields of a message that are set, and of those in it."""
    for field, value in message.ListFields():
        yield field
        if field.type == FieldDescriptor.TYPE_MESSAGE and is_ours(field.message_type):
            for each in value if field.is_repeated else [value]:
                yield from set_fields(each)


def is_ours(descriptor: Descriptor) -> bool:
    return descriptor.full_name.startswith("blockyard.") and not descriptor.GetOptions().map_entry


def all_fields(descriptor: Descriptor) -> set[str]:
    """The fields of a message, and of those in it."""
    found = {field.full_name for field in descriptor.fields}
    inner = (field.message_type for field in descriptor.fields if field.message_type is not None)
    return found.union(*(all_fields(each) for each in inner if is_ours(each)))


def test_every_field_of_the_proto_has_a_feature() -> None:
    fronts = [front for front in FRONTS if front.wire == "grpc"]
    asked = [case.ask(front) for front in fronts for case in (BASES, *FEATURES) if case.concerns(front)]
    told = {field.full_name for each in asked for field in set_fields(spec_of({**each, "request_id": "r"}))}
    assert told == all_fields(inference_pb2.GenerationSpec.DESCRIPTOR)


def parameters_of(kind: Any) -> set[str]:
    """Those of a body that do something."""
    return {
        name
        for name, field in kind.model_fields.items()
        if name not in getattr(kind, "WITHOUT_EFFECT", ())
        and not any(isinstance(item, Neutral) for item in field.metadata)
    }


def test_every_parameter_of_a_body_has_a_feature() -> None:
    for family, kind in (("text", CompletionBody), ("chat", ChatBody)):
        front = next(front for front in FRONTS if (front.family, front.wire) == (family, "http"))
        bodies = [body_of(case.ask(front), family) for case in (BASES, *FEATURES) if case.concerns(front)]
        told = {name for body in bodies for name in body} | {"request_id"}
        assert told >= parameters_of(kind) - ONLY_HTTP.keys()
        assert told <= kind.model_fields.keys()


def shapes_in(annotation: Any) -> Iterator[type[Shape]]:
    """The shapes that a field holds, and those in them."""
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        yield annotation
        for field in annotation.model_fields.values():
            yield from shapes_in(field.annotation)
    for each in typing.get_args(annotation):
        yield from shapes_in(each)


def keys_of(value: Any) -> Iterator[str]:
    """The names in messages and tools as they are sent."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            if name != "parameters":
                yield from keys_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from keys_of(each)


def test_every_part_of_a_message_or_tool_has_a_feature() -> None:
    front = next(front for front in FRONTS if (front.family, front.wire) == ("chat", "http"))
    bodies = [body_of(case.ask(front), "chat") for case in FEATURES if case.concerns(front)]
    for name in ("messages", "tools"):
        told = {key for body in bodies for key in keys_of(body.get(name))}
        shapes = list(shapes_in(ChatBody.model_fields[name].annotation))
        assert shapes
        assert told == {parameter for shape in shapes for parameter in parameters_of(shape)} | TEXT_PART[name]


def test_what_is_left_out_exists() -> None:
    names = CompletionBody.model_fields.keys() | ChatBody.model_fields.keys()
    assert ONLY_HTTP.keys() <= names


def test_every_case_has_a_name_of_its_own() -> None:
    for front in FRONTS:
        names = [case.name for case in cases_of(front)]
        assert len(names) == len(set(names))
    assert COMMON.keys() <= {path for case in FEATURES for path in case.asked}
