"""Describes the routes of the API for the OpenAPI document."""

from __future__ import annotations

from blockyard.errors import Reason
from gateway.fronts.anthropic.schema import CountBody, MessagesBody
from gateway.fronts.http_calls.openapi import EVENTS, JSON, TENANT, ApiBodies, documented

_PAGES = "https://docs.anthropic.com/en/api"
BODIES = ApiBodies((MessagesBody, CountBody), {MessagesBody: {}})
MESSAGES = documented(
    f"Anthropic's [message]({_PAGES}/messages), or its events; the name of an event is the type in its data",
    Reason,
    bodies=(MessagesBody,),
    parameters=(TENANT,),
    forms=(JSON, EVENTS),
)
COUNT_TOKENS = documented(
    f"Anthropic's [count of tokens]({_PAGES}/messages-count-tokens)", Reason, bodies=(CountBody,), parameters=(TENANT,)
)
