"""Generates the OpenAPI document from the code's types and rules: bodies, ranges of values, and errors.

Knows no route's implementation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from blockyard.errors import Reason
from gateway.fronts.http_calls.bodies import ANTHROPIC_VERSION
from gateway.fronts.http_calls.openapi import ALWAYS, EVENTS, JSON, TENANT, ApiBodies, call_id, documented, header
from gateway.fronts.openai.pooling import schema as pooling
from gateway.fronts.openai.schema.json_limits import tell_lengths, tell_ranges
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.fronts.openai.tokenization import DetokenizeBody, TokenizeBody, TokenizeChatBody
from gateway.request import REQUEST_ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.fronts.http_calls.body_types import Shape

_PAGES = "https://platform.openai.com/docs/api-reference"
_VLLM = "https://docs.vllm.ai/en/latest/serving/openai_compatible_server"
_BODIES = ApiBodies(
    (
        CompletionBody,
        ChatBody,
        TokenizeBody,
        TokenizeChatBody,
        DetokenizeBody,
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
    """Documents a call that generates."""
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
    """Documents a call for vectors, scores or labels."""
    return documented(answer, Reason, bodies=(body,), parameters=(_KEY, TENANT))


EMBEDDINGS = _pools(f"OpenAI's [embeddings]({_PAGES}/embeddings)", pooling.EmbeddingBody)
RERANK = _pools("Cohere's [ranking](https://docs.cohere.com/reference/rerank)", pooling.RerankBody)
SCORE = _pools(f"vLLM's [scores]({_VLLM})", pooling.ScoreBody)
CLASSIFY = _pools(f"vLLM's [labels]({_VLLM})", pooling.ClassifyBody)
MODELS = documented(f"OpenAI's [list of models]({_PAGES}/models/list)", ALWAYS, parameters=(_FORM,))
MODEL = documented(f"OpenAI's [model]({_PAGES}/models/object)", (*ALWAYS, Reason.MODEL_NOT_FOUND), parameters=(_FORM,))
TOKENIZE = documented(
    f"vLLM's [token ids]({_VLLM})",
    (*_READING, Reason.UNSUPPORTED_PARAMETER, Reason.MODEL_NOT_FOUND, Reason.FEATURE_DISABLED, Reason.NO_READY_WORKER),
    bodies=(TokenizeBody, TokenizeChatBody),
)
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
