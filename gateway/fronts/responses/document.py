"""Describes the routes of the API for the OpenAPI document."""

from __future__ import annotations

import functools

from blockyard.errors import Reason
from gateway.fronts.http_calls.openapi import EVENTS, JSON, TENANT, ApiBodies, call_id, documented
from gateway.fronts.responses.schema import InputTokensBody, ResponseBody

_PAGES = "https://platform.openai.com/docs/api-reference"
_RESPONSE = f"OpenAI's [response]({_PAGES}/responses/object)"
_STREAMED = f"{_RESPONSE}, or its [events]({_PAGES}/responses-streaming); an event's name is the type in its data"
_RESPONSE_ID = call_id("response_id", "the id of a response in the background")
_streamed = functools.partial(documented, _STREAMED, Reason, forms=(JSON, EVENTS))
BODIES = ApiBodies((ResponseBody, InputTokensBody), {ResponseBody: {"max_tokens": "max_output_tokens"}})
CREATE = _streamed(bodies=(ResponseBody,), parameters=(TENANT,))
COUNT_TOKENS = documented(
    f"OpenAI's [count of tokens]({_PAGES}/responses/input-tokens)",
    Reason,
    bodies=(InputTokensBody,),
    parameters=(TENANT,),
)
RETRIEVE = _streamed(parameters=(_RESPONSE_ID, TENANT))
CANCEL = documented(_RESPONSE, Reason, parameters=(_RESPONSE_ID, TENANT))
