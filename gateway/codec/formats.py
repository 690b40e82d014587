"""Decodes and encodes the forms that answers must have."""

from __future__ import annotations

from blockyard.inference.v1 import inference_pb2
from gateway.request import Choices, JsonObject, JsonSchema, Lark, OutputFormat, Regex


def decode_format(message: inference_pb2.OutputFormat) -> OutputFormat | None:
    """Reads a format; None: one of a later version, or none."""
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


def encode_format(output: OutputFormat) -> inference_pb2.OutputFormat:
    """Writes a format."""
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
