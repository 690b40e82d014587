"""Describes the routes of the API for the OpenAPI document."""

from __future__ import annotations

from blockyard.errors import Reason
from gateway.fronts.anthropic.answer_shapes import (
    EVENTS,
    AnsweredMessage,
    AnthropicModel,
    AnthropicModels,
    CountedTokens,
    MessageFailure,
)
from gateway.fronts.anthropic.schema import CountBody, MessagesBody
from gateway.fronts.http_calls.openapi import TENANT, ApiShapes, OtherForm, documented, header, named_events, streamed

VERSION = "anthropic-version"
_VERSION = header(VERSION, "asks for Anthropic's form, whatever it says")
SHAPES = ApiShapes(
    (MessagesBody, CountBody, AnsweredMessage, CountedTokens, AnthropicModel, AnthropicModels, *EVENTS),
    {MessagesBody: {}},
    {
        "/v1/models": OtherForm(_VERSION, AnthropicModels, MessageFailure),
        "/v1/models/{name}": OtherForm(_VERSION, AnthropicModel, MessageFailure),
    },
)
MESSAGES = streamed(
    documented(AnsweredMessage, Reason, failure=MessageFailure, bodies=(MessagesBody,), parameters=(TENANT,)),
    named_events(*EVENTS),
)
COUNT_TOKENS = documented(CountedTokens, Reason, failure=MessageFailure, bodies=(CountBody,), parameters=(TENANT,))
