"""Encodes and decodes requests of generations, the forms of their answers, and positions in these."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from blockyard.contract.chat import Conversation
from blockyard.contract.codec.chat import decode_conversation, encode_conversation
from blockyard.contract.codec.messages import EnumCodec, decode_seconds, encode_seconds
from blockyard.contract.codec.sampling import (
    decode_beams,
    decode_sampling,
    decode_stop,
    encode_beams,
    encode_sampling,
    encode_stop,
)
from blockyard.contract.request import (
    Choices,
    GenerationSpec,
    JsonObject,
    JsonSchema,
    Lark,
    OnDisconnect,
    OnUpdate,
    Position,
    Regex,
)
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from blockyard.contract.request import OutputFormat

Spec = TypeVar("Spec", bound=GenerationSpec)

_ON_DISCONNECT = EnumCodec(OnDisconnect, inference_pb2.OnDisconnect.items(), "ON_DISCONNECT_", zero=OnDisconnect.ABORT)
_ON_UPDATE = EnumCodec(OnUpdate, inference_pb2.OnUpdate.items(), "ON_UPDATE_", zero=OnUpdate.CONTINUE)


def encode_spec(spec: GenerationSpec) -> inference_pb2.GenerationSpec:
    """Encodes a request; options that have their default are left out."""
    message = encode_options(spec)
    if isinstance(spec.prompt, str):
        message.text = spec.prompt
    elif isinstance(spec.prompt, Conversation):
        message.conversation.CopyFrom(encode_conversation(spec.prompt))
    else:
        # An empty list is a prompt too, for the gateway to refuse.
        message.token_ids.SetInParent()
        message.token_ids.ids.extend(spec.prompt)
    if spec.add_special_tokens is not True:
        message.add_special_tokens = spec.add_special_tokens
    if spec.truncate_prompt_tokens is not None:
        message.truncate_prompt_tokens = spec.truncate_prompt_tokens
    message.suffix = spec.suffix
    return message


def encode_options(spec: GenerationSpec) -> inference_pb2.GenerationSpec:
    """Encodes a request without its prompt and the options of that."""
    return inference_pb2.GenerationSpec(
        request_id=spec.request_id,
        model=spec.model,
        sampling=encode_sampling(spec.sampling),
        stop=encode_stop(spec.stop),
        n=None if spec.n == 1 else spec.n,
        return_token_ids=spec.return_token_ids,
        skip_special_tokens=None if spec.skip_special_tokens is True else spec.skip_special_tokens,
        on_disconnect=_ON_DISCONNECT.encode(spec.on_disconnect),
        on_update=_ON_UPDATE.encode(spec.on_update),
        priority=spec.priority,
        max_queue_time=encode_seconds(spec.max_queue_seconds),
        beam_search=encode_beams(spec.beam_search) if spec.beam_search is not None else None,
        format=encode_format(spec.format) if spec.format is not None else None,
        cache_salt=spec.cache_salt,
    )


def decode_spec(message: inference_pb2.GenerationSpec, kind: type[Spec]) -> Spec:
    """Decodes a request; a prompt that is absent becomes an empty text.

    Enum numbers of a later version are read as the default. `kind`: the class to make, whose further fields have
    defaults.

    Raises BlockyardError as `decode_conversation` does.
    """
    return kind(
        prompt=_decode_prompt(message),
        request_id=message.request_id,
        model=message.model,
        sampling=decode_sampling(message.sampling),
        stop=decode_stop(message.stop),
        n=message.n if message.HasField("n") else 1,
        return_token_ids=message.return_token_ids,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        truncate_prompt_tokens=message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None,
        suffix=message.suffix,
        on_disconnect=_ON_DISCONNECT.decode(message.on_disconnect),
        on_update=_ON_UPDATE.decode(message.on_update),
        priority=message.priority,
        max_queue_seconds=decode_seconds(message, "max_queue_time"),
        beam_search=decode_beams(message.beam_search) if message.HasField("beam_search") else None,
        format=decode_format(message.format) if message.HasField("format") else None,
        cache_salt=message.cache_salt,
    )


def _decode_prompt(message: inference_pb2.GenerationSpec) -> str | tuple[int, ...] | Conversation:
    match message.WhichOneof("prompt"):
        case "token_ids":
            return tuple(message.token_ids.ids[:])
        case "conversation":
            return decode_conversation(message.conversation)
        case _:
            return message.text


def encode_format(output: OutputFormat) -> inference_pb2.OutputFormat:
    match output:
        case JsonSchema():
            schema = inference_pb2.JsonSchema(schema=output.schema, compact=output.compact)
            return inference_pb2.OutputFormat(json_schema=schema)
        case JsonObject():
            return inference_pb2.OutputFormat(json_object=True)
        case Regex():
            return inference_pb2.OutputFormat(regex=output.pattern)
        case Choices():
            return inference_pb2.OutputFormat(choices=inference_pb2.Choices(texts=output.texts))
        case Lark():
            return inference_pb2.OutputFormat(grammar=output.text)


def decode_format(message: inference_pb2.OutputFormat) -> OutputFormat | None:
    """Decodes the form of an answer; None for a form of a later version, and for no form."""
    match message.WhichOneof("format"):
        case "json_schema":
            return JsonSchema(message.json_schema.schema, message.json_schema.compact)
        case "json_object":
            return JsonObject() if message.json_object else None
        case "regex":
            return Regex(message.regex)
        case "choices":
            return Choices(tuple(message.choices.texts))
        case "grammar":
            return Lark(message.grammar)
        case _:
            return None


def encode_position(index: int, position: Position) -> inference_pb2.Position:
    return inference_pb2.Position(
        index=index,
        num_tokens=position.num_tokens,
        num_text_bytes=position.num_text_bytes,
        finished=position.finished,
        token_ids=position.token_ids,
    )


def decode_position(message: inference_pb2.Position) -> Position:
    return Position(message.num_tokens, message.num_text_bytes, message.finished, tuple(message.token_ids[:]))
