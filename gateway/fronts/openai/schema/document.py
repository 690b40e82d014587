"""Generates the OpenAPI document, errors and ranges included, from the types and rules of the code.

Knows no route's implementation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from blockyard.errors import TABLE, Reason
from blockyard.headers import TENANT_KEY, TENANT_PATTERN
from gateway.fronts.openai.pooling import schema as pooling
from gateway.fronts.openai.schema import answers
from gateway.fronts.openai.schema.json_limits import tell_limits
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.fronts.openai.tokenization import DetokenizeBody, TokenizeBody, TokenizeChatBody
from gateway.naming import REQUEST_ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import FastAPI

    from gateway.fronts.http_calls.body_types import Shape

JSON = "application/json"
EVENTS = "text/event-stream"
_MODELS: tuple[type[Shape], ...] = (
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
    answers.Completion,
    answers.CompletionChunk,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.ModelList,
    answers.Model,
    answers.Cancelled,
    answers.Tokens,
    answers.Detokenized,
    answers.Health,
    answers.Version,
    answers.Failure,
)
# Whoever calls: what the server may answer to anything at all.
_ALWAYS = (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.BUG)
_READING = (*_ALWAYS, Reason.FIELD_INVALID, Reason.MESSAGE_TOO_LARGE, Reason.CLIENT_CANCELLED)
_UNSUPPORTED_MEDIA_TYPE = 415
_RETRIED = {429, 503}
_RETRY_AFTER = {
    "Retry-After": {"description": "seconds until it makes sense to try again", "schema": {"type": "integer"}}
}


def _ref(model: type[Shape]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _one_of(models: Iterable[type[Shape]]) -> dict[str, Any]:
    refs = [_ref(model) for model in models]
    return refs[0] if len(refs) == 1 else {"oneOf": refs}


def _any_of(models: Iterable[type[Shape]]) -> dict[str, Any]:
    return {"anyOf": [_ref(model) for model in models]}


def _content(schema: dict[str, Any], media_type: str = JSON) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


def _header(name: str, description: str, pattern: str = "") -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{pattern}$"} if pattern else {"type": "string"}
    return {"in": "header", "name": name, "required": False, "description": description, "schema": schema}


_REQUEST_ID = {
    "in": "path",
    "name": "request_id",
    "required": True,
    "description": "the call's id, or its Idempotency-Key",
    "schema": {"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"},
}
_KEY = _header("Idempotency-Key", "names the call, to send it again, resume it or cancel it", REQUEST_ID_PATTERN)
_TENANT = _header(TENANT_KEY, "whose call it is", TENANT_PATTERN)
_PLACE = _header("Last-Event-ID", "the id of the last event that came; without it the stream comes from its beginning")


def _failures(reasons: Iterable[Reason], *others: int) -> dict[int | str, dict[str, Any]]:
    """Describes the answers of failures, one status for several reasons."""
    causes: dict[int, list[str]] = {}
    for reason in reasons:
        causes.setdefault(TABLE[reason].http_status, []).append(reason)
    causes |= {status: ["the body is not JSON"] for status in others}
    return {
        status: {"description": ", ".join(names), **_content(_ref(answers.Failure))}
        | ({"headers": _RETRY_AFTER} if status in _RETRIED else {})
        for status, names in sorted(causes.items())
    }


def _documented(
    answer: type[Shape],
    reasons: Iterable[Reason],
    *,
    bodies: tuple[type[Shape], ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    """Returns the arguments of `add_api_route` that document a route."""
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if bodies:
        extra["requestBody"] = {"required": True, **_content(_one_of(bodies))}
    failures = _failures(reasons, *([_UNSUPPORTED_MEDIA_TYPE] if bodies else []))
    return {
        "responses": {200: {"description": "done", **_content(_ref(answer))}, **failures},
        "openapi_extra": extra,
    }


def _streamed(documented: dict[str, Any], *chunks: type[Shape], only: bool = False) -> dict[str, Any]:
    """Adds that the answer may be a stream, or is nothing else. What is said of a stream is said of each event."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": _any_of((*chunks, answers.Failure))}
    event = {
        "type": "object",
        "description": "The last one is [DONE], or a Failure instead.",
        "required": ["data"],
        "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}, "id": {"type": "string"}},
    }
    content = documented["responses"][200]["content"]
    content[EVENTS] = {"schema": event}
    if only:
        del content[JSON]
    return documented


def _call(body: type[Shape], answer: type[Shape], chunk: type[Shape]) -> dict[str, Any]:
    """Documents a call that generates."""
    return _streamed(_documented(answer, Reason, bodies=(body,), parameters=(_KEY, _PLACE, _TENANT)), chunk)


COMPLETIONS = _call(CompletionBody, answers.Completion, answers.CompletionChunk)
CHATS = _call(ChatBody, answers.ChatCompletion, answers.ChatChunk)
RESUME = _streamed(
    _documented(answers.Completion, Reason, parameters=(_REQUEST_ID, _PLACE, _TENANT)),
    answers.CompletionChunk,
    answers.ChatChunk,
    only=True,
)
CANCEL = _documented(
    answers.Cancelled, (*_ALWAYS, Reason.FIELD_INVALID, Reason.NO_READY_WORKER), parameters=(_REQUEST_ID, _TENANT)
)


def _pools(body: type[Shape], answer: type[Shape]) -> dict[str, Any]:
    """Documents a call for numbers."""
    return _documented(answer, Reason, bodies=(body,), parameters=(_KEY, _TENANT))


EMBEDDINGS = _pools(pooling.EmbeddingBody, pooling.EmbeddingList)
RERANK = _pools(pooling.RerankBody, pooling.RerankList)
SCORE = _pools(pooling.ScoreBody, pooling.ScoreList)
CLASSIFY = _pools(pooling.ClassifyBody, pooling.ClassifyList)
MODELS = _documented(answers.ModelList, _ALWAYS)
MODEL = _documented(answers.Model, (*_ALWAYS, Reason.MODEL_NOT_FOUND))
TOKENIZE = _documented(
    answers.Tokens,
    (*_READING, Reason.UNSUPPORTED_PARAMETER, Reason.MODEL_NOT_FOUND, Reason.FEATURE_DISABLED, Reason.NO_READY_WORKER),
    bodies=(TokenizeBody, TokenizeChatBody),
)
DETOKENIZE = _documented(answers.Detokenized, (*_READING, Reason.MODEL_NOT_FOUND), bodies=(DetokenizeBody,))
READY = _documented(answers.Health, (Reason.NO_READY_WORKER,))
ALIVE = _documented(answers.Health, ())
VERSION = _documented(answers.Version, _ALWAYS)


def describe(app: FastAPI) -> None:
    """Makes an application serve the document."""
    make_document = app.openapi

    @functools.cache
    def openapi() -> dict[str, Any]:
        document = make_document()
        _, schemas = models_json_schema(
            [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
        )
        tell_limits(schemas["$defs"][CompletionBody.__name__]["properties"], {})
        tell_limits(schemas["$defs"][ChatBody.__name__]["properties"], {"logprobs": "top_logprobs"})
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
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
