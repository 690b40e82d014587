"""Generates the OpenAPI document, errors and ranges included, from the types and rules of the code.

Knows no route's implementation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from blockyard.errors import Reason
from gateway.fronts.http_calls.openapi import (
    ALWAYS,
    JSON,
    TENANT,
    ApiShapes,
    call_id,
    data_of,
    documented,
    header,
    streamed,
)
from gateway.fronts.openai.pooling import schema as pooling
from gateway.fronts.openai.schema import answers
from gateway.fronts.openai.schema.json_limits import tell_lengths, tell_ranges
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.fronts.openai.tokenization import DetokenizeBody, TokenizeBody, TokenizeChatBody
from gateway.naming import REQUEST_ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic.json_schema import JsonSchemaMode

    from gateway.fronts.http_calls.body_types import Shape

_MODELS = (
    CompletionBody,
    ChatBody,
    TokenizeBody,
    TokenizeChatBody,
    DetokenizeBody,
    pooling.EmbeddingBody,
    pooling.RerankBody,
    pooling.ScoreBody,
    pooling.ClassifyBody,
    pooling.EmbeddingList,
    pooling.RerankList,
    pooling.ScoreList,
    pooling.ClassifyList,
    answers.TextCompletion,
    answers.CompletionChunk,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.ModelList,
    answers.ServedModel,
    answers.Cancelled,
    answers.Tokens,
    answers.Detokenized,
    answers.Health,
    answers.Version,
    answers.Failure,
)
_SHAPES = ApiShapes(_MODELS, {CompletionBody: {}, ChatBody: {"logprobs": "top_logprobs"}})
_READING = (*ALWAYS, Reason.FIELD_INVALID, Reason.MESSAGE_TOO_LARGE, Reason.CLIENT_CANCELLED)
_REQUEST_ID = call_id("request_id", "the call's id, or its Idempotency-Key")
_KEY = header("Idempotency-Key", "names the call, to send it again, resume it or cancel it", REQUEST_ID_PATTERN)
_PLACE = header("Last-Event-ID", "the id of the last event that came; without it the stream comes from its beginning")
_documented = functools.partial(documented, failure=answers.Failure)


def _event(*chunks: type[Shape]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": "The last one is [DONE], or a Failure instead.",
        "required": ["data"],
        "properties": {
            "data": {"anyOf": [data_of(*chunks, answers.Failure), {"const": "[DONE]"}]},
            "id": {"type": "string"},
        },
    }


def _call(body: type[Shape], answer: type[Shape], chunk: type[Shape]) -> dict[str, Any]:
    """Documents a call that generates."""
    return streamed(_documented(answer, Reason, bodies=(body,), parameters=(_KEY, _PLACE, TENANT)), _event(chunk))


COMPLETIONS = _call(CompletionBody, answers.TextCompletion, answers.CompletionChunk)
CHATS = _call(ChatBody, answers.ChatCompletion, answers.ChatChunk)
RESUME = streamed(
    _documented(answers.TextCompletion, Reason, parameters=(_REQUEST_ID, _PLACE, TENANT)),
    _event(answers.CompletionChunk, answers.ChatChunk),
    only=True,
)
CANCEL = _documented(
    answers.Cancelled, (*ALWAYS, Reason.FIELD_INVALID, Reason.NO_READY_WORKER), parameters=(_REQUEST_ID, TENANT)
)


def _pools(body: type[Shape], answer: type[Shape]) -> dict[str, Any]:
    """Documents a call for numbers."""
    return _documented(answer, Reason, bodies=(body,), parameters=(_KEY, TENANT))


EMBEDDINGS = _pools(pooling.EmbeddingBody, pooling.EmbeddingList)
RERANK = _pools(pooling.RerankBody, pooling.RerankList)
SCORE = _pools(pooling.ScoreBody, pooling.ScoreList)
CLASSIFY = _pools(pooling.ClassifyBody, pooling.ClassifyList)
MODELS = _documented(answers.ModelList, ALWAYS)
MODEL = _documented(answers.ServedModel, (*ALWAYS, Reason.MODEL_NOT_FOUND))
TOKENIZE = _documented(
    answers.Tokens,
    (*_READING, Reason.UNSUPPORTED_PARAMETER, Reason.MODEL_NOT_FOUND, Reason.FEATURE_DISABLED, Reason.NO_READY_WORKER),
    bodies=(TokenizeBody, TokenizeChatBody),
)
DETOKENIZE = _documented(answers.Detokenized, (*_READING, Reason.MODEL_NOT_FOUND), bodies=(DetokenizeBody,))
READY = _documented(answers.Health, (Reason.NO_READY_WORKER,))
ALIVE = _documented(answers.Health, ())
VERSION = _documented(answers.Version, ALWAYS)


def describe(app: FastAPI, others: Sequence[ApiShapes] = ()) -> None:
    """Makes an application serve the document, with the shapes of other APIs that it has. The last one counts."""
    apis = (_SHAPES, *others)
    # At once, so that shapes of one name get names of their own.
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
        for path, form in (item for api in apis for item in api.forms.items()):
            form.describe(document["paths"][path]["get"])
        for path in document["paths"].values():
            for operation in path.values():
                _leave_out_defaults(operation)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi


def _leave_out_defaults(operation: dict[str, Any]) -> None:
    """Removes FastAPI's defaults where the document has better ones, and its errors, which are never sent."""
    operation["responses"].pop("422", None)
    if parameters := operation.get("parameters"):
        operation["parameters"] = list({(each["in"], each["name"]): each for each in parameters}.values())
    for each in operation["responses"].values():
        if len(content := each.get("content", {})) > 1 and content.get(JSON) == {"schema": {}}:
            del content[JSON]
