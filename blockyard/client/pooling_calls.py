"""Both clients' calls for embeddings, scores and labels, and their protobuf requests."""
# ruff: noqa: ASYNC109 - the timeout is sent to the server and covers all tries, unlike asyncio.timeout.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Unpack

from blockyard.contract.codec.messages import encode_seconds
from blockyard.contract.codec.pooling import decode_classifications, decode_embeddings, decode_scores
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.client.pooling import ClassifyOptions, EmbedOptions, ScoreOptions
    from blockyard.contract.pooling import Classifications, Embeddings, Scores

    Input = str | Sequence[int]

_OF_ALL = ("request_id", "model", "priority", "truncate_prompt_tokens", "add_special_tokens")
_OWN = {
    "embed": ("dimensions", "normalise", "prompt_name"),
    "score": ("instruction", "top_n"),
    "classify": ("raw",),
}


class PoolingCalls(ABC):
    """The pooling calls of the synchronous client. Each returns its whole answer, which depends only on the request.

    Raises BlockyardError (FEATURE_DISABLED) if the model is served for another task.
    """

    @abstractmethod
    def _call(self, method: str, request: Any, timeout: float | None) -> Any: ...

    def embed(
        self, inputs: Sequence[Input], *, timeout: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Computes a vector for each input: a text or a list of token ids; at most 2048 inputs."""
        return decode_embeddings(self._call("Embed", _make_embed(inputs, options), timeout))

    def score(
        self, query: Input, documents: Sequence[Input], *, timeout: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Scores:
        """Scores how well each of the documents, at most 2048, answers a query."""
        return decode_scores(self._call("Score", _make_score(query, documents, options), timeout))

    def classify(
        self, inputs: Sequence[Input], *, timeout: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Classifications:
        """Computes the probability of each of the model's labels for each input."""
        return decode_classifications(self._call("Classify", _make_classify(inputs, options), timeout))


class AsyncPoolingCalls(ABC):
    """The pooling calls of the asynchronous client, as in `PoolingCalls`."""

    @abstractmethod
    async def _call(self, method: str, request: Any, timeout: float | None) -> Any: ...

    async def embed(
        self, inputs: Sequence[Input], *, timeout: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Embeddings:
        """Computes a vector for each input: a text or a list of token ids; at most 2048 inputs."""
        return decode_embeddings(await self._call("Embed", _make_embed(inputs, options), timeout))

    async def score(
        self, query: Input, documents: Sequence[Input], *, timeout: float | None = None, **options: Unpack[ScoreOptions]
    ) -> Scores:
        """Scores how well each of the documents, at most 2048, answers a query."""
        return decode_scores(await self._call("Score", _make_score(query, documents, options), timeout))

    async def classify(
        self, inputs: Sequence[Input], *, timeout: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Classifications:
        """Computes the probability of each of the model's labels for each input."""
        return decode_classifications(await self._call("Classify", _make_classify(inputs, options), timeout))


def _make_embed(inputs: Sequence[Input], options: Mapping[str, Any]) -> inference_pb2.EmbedRequest:
    own = _split("embed", options)
    return inference_pb2.EmbedRequest(spec=_make_spec(options), inputs=_make_inputs(inputs), **own)


def _make_score(query: Input, documents: Sequence[Input], options: Mapping[str, Any]) -> inference_pb2.ScoreRequest:
    own, spec = _split("score", options), _make_spec(options)
    return inference_pb2.ScoreRequest(spec=spec, query=_make_input(query), documents=_make_inputs(documents), **own)


def _make_classify(inputs: Sequence[Input], options: Mapping[str, Any]) -> inference_pb2.ClassifyRequest:
    own = _split("classify", options)
    return inference_pb2.ClassifyRequest(spec=_make_spec(options), inputs=_make_inputs(inputs), **own)


def _split(call: str, options: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(options.keys() - {*_OF_ALL, "max_queue_seconds", *_OWN[call]})
    if unknown:
        raise TypeError(f"{call} has no option {unknown[0]!r}")
    return {name: options[name] for name in _OWN[call] if name in options}


def _make_spec(options: Mapping[str, Any]) -> inference_pb2.PoolingSpec:
    given = {name: options[name] for name in _OF_ALL if name in options}
    return inference_pb2.PoolingSpec(**given, max_queue_time=encode_seconds(options.get("max_queue_seconds")))


def _make_inputs(inputs: Sequence[Input]) -> list[inference_pb2.PoolingInput]:
    if isinstance(inputs, str):
        raise TypeError("inputs must be a list: use [text]")
    return [_make_input(each) for each in inputs]


def _make_input(given: Input) -> inference_pb2.PoolingInput:
    if isinstance(given, str):
        return inference_pb2.PoolingInput(text=given)
    return inference_pb2.PoolingInput(token_ids=inference_pb2.TokenIds(ids=given))
