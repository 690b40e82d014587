"""Describes the routes of the API for the OpenAPI document."""

from __future__ import annotations

from blockyard.errors import Reason
from gateway.fronts.anthropic.answer_shapes import EVENTS, AnsweredMessage, CountedTokens, MessageFailure
from gateway.fronts.anthropic.schema import CountBody, MessagesBody
from gateway.fronts.http_calls.openapi import TENANT, ApiShapes, documented, named_events, streamed

SHAPES = ApiShapes((MessagesBody, CountBody, AnsweredMessage, CountedTokens, *EVENTS), {MessagesBody: {}})
MESSAGES = streamed(
    documented(AnsweredMessage, Reason, failure=MessageFailure, bodies=(MessagesBody,), parameters=(TENANT,)),
    named_events(*EVENTS),
)
COUNT_TOKENS = documented(CountedTokens, Reason, failure=MessageFailure, bodies=(CountBody,), parameters=(TENANT,))
