"""Describes the routes of the API for the OpenAPI document."""

from __future__ import annotations

import functools

from blockyard.errors import Reason
from gateway.fronts.http_calls.openapi import TENANT, ApiShapes, call_id, documented, named_events, streamed
from gateway.fronts.openai.schema.answers import Failure
from gateway.fronts.responses.answer_shapes import EVENTS, CountedInput, ToldResponse
from gateway.fronts.responses.schema import InputTokensBody, ResponseBody

SHAPES = ApiShapes(
    (ResponseBody, InputTokensBody, ToldResponse, CountedInput, *EVENTS),
    {ResponseBody: {"max_tokens": "max_output_tokens"}},
)
_RESPONSE_ID = call_id("response_id", "the id of a response in the background")
_documented = functools.partial(documented, ToldResponse, Reason, failure=Failure)
CREATE = streamed(_documented(bodies=(ResponseBody,), parameters=(TENANT,)), named_events(*EVENTS))
COUNT_TOKENS = documented(CountedInput, Reason, failure=Failure, bodies=(InputTokensBody,), parameters=(TENANT,))
RETRIEVE = streamed(_documented(parameters=(_RESPONSE_ID, TENANT)), named_events(*EVENTS))
CANCEL = _documented(parameters=(_RESPONSE_ID, TENANT))
