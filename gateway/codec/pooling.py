"""Decodes the public API's calls for vectors, scores and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.codec.durations import decode_seconds
from blockyard.errors import Violation, invalid
from gateway.pooling_calls import CallOptions, ClassifyCall, EmbedCall, Input, ScoreCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.inference.v1 import inference_pb2


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
