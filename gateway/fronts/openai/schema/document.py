"""Generates the OpenAPI document from the code's types and rules: bodies, ranges of values, and errors.

Knows no route's implementation. A schema cannot express limits that depend on the model or on two parameters.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from blockyard.contract.sampling import MAX_FLOAT32, Range
from blockyard.errors import Reason
from gateway.fronts.http_calls.bodies import ANTHROPIC_VERSION
from gateway.fronts.http_calls.openapi import ALWAYS, EVENTS, JSON, TENANT, ApiBodies, call_id, documented, header
from gateway.fronts.openai import errors
from gateway.fronts.openai.pooling import schema as pooling
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody, LoadBody
from gateway.fronts.openai.tokenization import DetokenizeBody, TokenizeBody, TokenizeChatBody
from gateway.request import REQUEST_ID_PATTERN
from gateway.validation import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    RULES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gateway.fronts.http_calls.body_types import Shape


_MAX_BIAS = 100


def tell_ranges(properties: dict[str, Any], names: Mapping[str, str]) -> None:
    """Adds the ranges of numbers to the schemas of a body's parameters.

    Args:
        properties: the schemas by the parameters' names; changed in place.
        names: the body's names for the core's fields, where they differ from the general names.
    """
    for rule in RULES:
        # best_of only has this range if it is the width of a beam search: leave it out.
        if rule.field == "beam_search.width":
            continue
        for form in properties.get(errors.parameter(rule.field, names), {}).get("anyOf", ()):
            if form.get("type") in ("integer", "number"):
                form |= _bounds(rule.range)


def _bounds(values: Range) -> dict[str, float]:
    bounds: dict[str, float] = {}
    if values.low > -MAX_FLOAT32:
        bounds["exclusiveMinimum" if values.low_is_open else "minimum"] = values.low
    if values.high < MAX_FLOAT32:
        bounds["maximum"] = values.high
    return bounds


def tell_lengths(properties: dict[str, Any]) -> None:
    """Adds the limits other than ranges to the parameters of a completion or a chat, in place."""
    # Over HTTP, -1 also turns these off.
    for name in ("top_k", "thinking_token_budget"):
        _form(properties[name], "integer")["minimum"] = -1
    _form(properties["truncate_prompt_tokens"], "integer").update({"minimum": -1, "not": {"const": 0}})
    stop = {"minLength": 1, "maxLength": MAX_STOP_STRING_CHARACTERS}
    word = {"minLength": 1, "maxLength": MAX_BAD_WORD_CHARACTERS}
    bias: dict[str, Any] = {"minimum": -_MAX_BIAS, "maximum": _MAX_BIAS}
    _form(properties["request_id"], "string")["pattern"] = f"^{REQUEST_ID_PATTERN}$"
    _form(properties["stop"], "string").update(stop)
    _set_item_limits(properties["stop"], stop, MAX_STOP_STRINGS)
    _set_item_limits(properties["bad_words"], word, MAX_BAD_WORDS)
    _set_item_limits(properties["stop_token_ids"], {"minimum": 0})
    for name in ("allowed_token_ids", "predicted_token_ids"):
        _set_item_limits(properties[name], {"minimum": 0})
    biases = _form(properties["logit_bias"], "object")
    biases["additionalProperties"].update(bias)
    biases |= {"maxProperties": MAX_LOGIT_BIASES, "propertyNames": {"pattern": "^[0-9]{1,10}$"}}


def _set_item_limits(schema: dict[str, Any], limits: dict[str, Any], max_items: int | None = None) -> None:
    array = _form(schema, "array")
    array["items"].update(limits)
    if max_items is not None:
        array["maxItems"] = max_items


def _form(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns the alternative of a parameter's schema that has the type `kind`."""
    return next(form for form in schema["anyOf"] if form.get("type") == kind)


_PAGES = "https://platform.openai.com/docs/api-reference"

_VLLM = "https://docs.vllm.ai/en/latest/serving/openai_compatible_server"

_BODIES = ApiBodies(
    (
        CompletionBody,
        ChatBody,
        TokenizeBody,
        TokenizeChatBody,
        DetokenizeBody,
        LoadBody,
        pooling.EmbeddingBody,
        pooling.RerankBody,
        pooling.ScoreBody,
        pooling.ClassifyBody,
    ),
    {CompletionBody: {}, ChatBody: {"logprobs": "top_logprobs"}},
)

_READING = (*ALWAYS, Reason.FIELD_INVALID, Reason.MESSAGE_TOO_LARGE, Reason.CLIENT_CANCELLED)

_REQUEST_ID = call_id("request_id", "the call's id, or its Idempotency-Key")

_KEY = header("Idempotency-Key", "names the call, to send it again, resume it or cancel it", REQUEST_ID_PATTERN)

_PLACE = header("Last-Event-ID", "the id of the last event that came; without it the stream comes from its beginning")

_FORM = header(ANTHROPIC_VERSION, "asks for the models in Anthropic's form, whatever its value")


def _call(answer: str, body: type[Shape]) -> dict[str, Any]:
    return documented(answer, Reason, bodies=(body,), parameters=(_KEY, _PLACE, TENANT), forms=(JSON, EVENTS))


COMPLETIONS = _call(f"OpenAI's [completion]({_PAGES}/completions), or its chunks", CompletionBody)

CHATS = _call(f"OpenAI's [chat completion]({_PAGES}/chat/object), or its [chunks]({_PAGES}/chat-streaming)", ChatBody)

RESUME = documented(
    "the chunks of the call's answer", Reason, parameters=(_REQUEST_ID, _PLACE, TENANT), forms=(EVENTS,)
)

CANCEL = documented(
    "whether the call was running",
    (*ALWAYS, Reason.FIELD_INVALID, Reason.NO_READY_WORKER),
    parameters=(_REQUEST_ID, TENANT),
)


def _pools(answer: str, body: type[Shape]) -> dict[str, Any]:
    return documented(answer, Reason, bodies=(body,), parameters=(_KEY, TENANT))


EMBEDDINGS = _pools(f"OpenAI's [embeddings]({_PAGES}/embeddings)", pooling.EmbeddingBody)

RERANK = _pools("Cohere's [ranking](https://docs.cohere.com/reference/rerank)", pooling.RerankBody)

SCORE = _pools(f"vLLM's [scores]({_VLLM})", pooling.ScoreBody)

CLASSIFY = _pools(f"vLLM's [labels]({_VLLM})", pooling.ClassifyBody)

MODELS = documented(f"OpenAI's [list of models]({_PAGES}/models/list)", ALWAYS, parameters=(_FORM,))

MODEL = documented(f"OpenAI's [model]({_PAGES}/models/object)", (*ALWAYS, Reason.MODEL_NOT_FOUND), parameters=(_FORM,))

LOAD = documented(
    f"OpenAI's [model]({_PAGES}/models/object), which is loaded",
    (*_READING, Reason.MODEL_NOT_FOUND, Reason.NO_READY_WORKER),
    bodies=(LoadBody,),
)


def describe_tokenize(bodies: Iterable[type[Shape]]) -> dict[str, Any]:
    """Documents /tokenize. `bodies`: the types of the bodies that it takes."""
    reasons = (Reason.UNSUPPORTED_PARAMETER, Reason.MODEL_NOT_FOUND, Reason.FEATURE_DISABLED, Reason.NO_READY_WORKER)
    return documented(f"vLLM's [token ids]({_VLLM})", (*_READING, *reasons), bodies=tuple(bodies))


DETOKENIZE = documented(f"vLLM's [text]({_VLLM})", (*_READING, Reason.MODEL_NOT_FOUND), bodies=(DetokenizeBody,))

READY = documented("requests can be served now", (Reason.NO_READY_WORKER,))

ALIVE = documented("the process works", ())

VERSION = documented("the version", ALWAYS)


def describe(app: FastAPI, others: Sequence[ApiBodies] = ()) -> None:
    """Makes an application serve the document, replacing an earlier one. `others`: bodies of its other APIs."""
    apis = (_BODIES, *others)
    # Generate all schemas in one call: types of the same name then get different names.
    models: list[tuple[type[Shape], JsonSchemaMode]] = [(model, "validation") for api in apis for model in api.models]

    @functools.cache
    def openapi() -> dict[str, Any]:
        document = FastAPI.openapi(app)
        _, told = models_json_schema(models, ref_template="#/components/schemas/{model}")
        schemas = told["$defs"]
        for body, names in (item for api in apis for item in api.names.items()):
            tell_ranges(schemas[body.__name__]["properties"], names)
        for body in (CompletionBody, ChatBody):
            tell_lengths(schemas[body.__name__]["properties"])
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        for path in document["paths"].values():
            for operation in path.values():
                _leave_out_defaults(operation)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi


def _leave_out_defaults(operation: dict[str, Any]) -> None:
    """Removes FastAPI's defaults that the document describes better, and FastAPI's errors, which are never sent."""
    operation["responses"].pop("422", None)
    if parameters := operation.get("parameters"):
        operation["parameters"] = list({(each["in"], each["name"]): each for each in parameters}.values())
    for each in operation["responses"].values():
        if len(content := each.get("content", {})) > 1 and content.get(JSON) == {"schema": {}}:
            del content[JSON]
