"""Serves embeddings, reranking, scores and labels over HTTP, in the forms of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response

from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.bodies import parse_body, read_json, read_key, read_tenant
from gateway.fronts.http_calls.streaming import Connection
from gateway.fronts.openai import errors
from gateway.fronts.openai.pooling.schema import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from gateway.pooling_calls import CallOptions, ClassifyCall, EmbedCall, Input, ScoreCall

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from blockyard.contract.pooling import PoolingFacts
    from gateway.generation import GenerationService

B = TypeVar("B", bound=PoolingBody)
T = TypeVar("T")
# The most numbers of an answer that is encoded on the event loop; larger answers are encoded in a thread.
_MAX_INLINE_NUMBERS = 4096


class PoolingEndpoints:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def embed(self, request: Request) -> Response:
        """Turns texts into vectors: OpenAI's embeddings."""
        body, options = await _read(EmbeddingBody, request)
        call = EmbedCall(
            options,
            _split(body.input),
            dimensions=body.dimensions,
            normalise=body.normalize is not False,
            prompt_name=body.prompt_name,
        )
        answer = await _wait(
            request,
            self._generation.model_of(options.model).pooling.embed(call),
            {"inputs": "input", "normalise": "normalize"},
        )
        write = _write_base64 if body.encoding_format == "base64" else list

        def make() -> bytes:
            data = [
                {"object": "embedding", "index": index, "embedding": write(vector)}
                for index, vector in enumerate(answer.vectors)
            ]
            return _encode(answer, data=data)

        num_numbers = sum(map(len, answer.vectors))
        content = make() if num_numbers <= _MAX_INLINE_NUMBERS else await asyncio.to_thread(make)
        return _answer(answer, content)

    async def rerank(self, request: Request) -> Response:
        """Sorts documents by how well they answer a query: Cohere's and Jina's rerank."""
        body, options = await _read(RerankBody, request)
        texts = tuple(each if isinstance(each, str) else each.text for each in body.documents)
        # `top_n` sorts the documents: pass it even if all of them are returned.
        top_n = len(texts) if body.top_n is None else body.top_n
        call = ScoreCall(options, (body.query,), texts, instruction=body.instruction or "", top_n=top_n)
        answer = await _wait(request, self._generation.model_of(options.model).pooling.score(call), {})
        results = [
            {"index": each.index, "relevance_score": each.score}
            | ({"document": {"text": texts[each.index]}} if body.return_documents else {})
            for each in answer.documents
        ]
        meta = {"tokens": {"input_tokens": answer.usage.num_prompt_tokens}}
        return _answer(answer, _encode(answer, results=results, meta=meta))

    async def score(self, request: Request) -> Response:
        """Scores how well texts answer other texts: vLLM's score."""
        body, options = await _read(ScoreBody, request)
        call = ScoreCall(options, _split(body.text_1), _split(body.text_2), instruction=body.instruction or "")
        answer = await _wait(
            request,
            self._generation.model_of(options.model).pooling.score(call),
            {"query": "text_1", "documents": "text_2"},
        )
        data = [{"object": "score", "index": each.index, "score": each.score} for each in answer.documents]
        return _answer(answer, _encode(answer, created=int(self._generation.clock.time()), data=data))

    async def classify(self, request: Request) -> Response:
        """Returns the labels of texts: vLLM's classify."""
        body, options = await _read(ClassifyBody, request)
        call = ClassifyCall(options, _split(body.input), raw=body.use_activation is False)
        answer = await _wait(
            request, self._generation.model_of(options.model).pooling.classify(call), {"inputs": "input"}
        )
        data = [
            {"index": index, "label": each.label, "probs": each.probabilities, "num_classes": len(each.probabilities)}
            for index, each in enumerate(answer.classifications)
        ]
        content = _encode(answer, created=int(self._generation.clock.time()), labels=answer.labels, data=data)
        return _answer(answer, content)


async def _read(kind: type[B], request: Request) -> tuple[B, CallOptions]:
    """Reads the body and the headers of a call; raises BlockyardError."""
    tenant, key = read_tenant(request), read_key(request)
    body = parse_body(kind, await read_json(request))
    options = body.options(tenant)
    return body, replace(options, request_id=key) if key else options


async def _wait(request: Request, work: Coroutine[Any, Any, T], names: dict[str, str]) -> T:
    """Waits for the answer as long as the client does; BlockyardErrors name parameters as in `names`."""
    connection = Connection(request.receive)
    try:
        return await connection.run(work)
    except BlockyardError as error:
        raise errors.rename(error, names) from None
    finally:
        await connection.aclose()


def _split(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> tuple[Input, ...]:
    """Returns the inputs of a body: one text, several texts, one list of token ids, or several lists."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)  # type: ignore[arg-type]
    return tuple(each if isinstance(each, str) else tuple(each) for each in given)  # type: ignore[arg-type]


def _write_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(array("f", vector)).decode()


def _encode(facts: PoolingFacts, **fields: Any) -> bytes:
    usage = {"prompt_tokens": facts.usage.num_prompt_tokens, "total_tokens": facts.usage.num_prompt_tokens}
    answer = {"id": facts.request_id, "object": "list", "model": facts.model, **fields, "usage": usage}
    return json.dumps(answer, separators=(",", ":")).encode()


def _answer(facts: PoolingFacts, content: bytes) -> Response:
    return Response(content, headers={"x-request-id": facts.request_id}, media_type="application/json")
