"""Turns the body of an Anthropic call into a request to the gateway's core, and the options of its answer."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.contract.sampling import SamplingParams, StopCriteria
from gateway.fronts.anthropic.conversation import conversation_of
from gateway.fronts.http_calls.body_types import schema_format
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from blockyard.contract.request import OutputFormat
    from gateway.fronts.anthropic.schema import CountBody, MessagesBody


@dataclass(frozen=True, slots=True)
class MessageCall:
    request: GenerationRequest
    max_tokens: int
    stream: bool
    # Whether the answer's thinking blocks are empty.
    hides_thinking: bool


def understand(body: MessagesBody, tenant: str) -> MessageCall:
    request = GenerationRequest(
        prompt=conversation_of(body),
        request_id=f"msg_{uuid.uuid4().hex}",
        model=body.model,
        sampling=SamplingParams(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
        stop=StopCriteria(max_tokens=body.max_tokens, stop_strings=tuple(body.stop_sequences or ())),
        format=_format(body),
        tenant=tenant,
    )
    hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
    return MessageCall(request, body.max_tokens, bool(body.stream), hides_thinking)


def _format(body: MessagesBody) -> OutputFormat | None:
    asked = (body.output_config and body.output_config.format) or body.output_format
    return schema_format(asked.json_schema) if asked else None


def understand_count(body: CountBody, tenant: str) -> GenerationRequest:
    """Makes a request from a body of /v1/messages/count_tokens, to count the tokens of its prompt."""
    return GenerationRequest(prompt=conversation_of(body), model=body.model, tenant=tenant)
