"""The bodies and the answers of embeddings, reranking, scores and labels, in the forms of those who began them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape
from gateway.pooling_calls import CallOptions

TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = str | Annotated[list[str], Field(min_length=1, fail_fast=True)]
Inputs = Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


class PoolingBody(Shape):
    """What all these calls have."""

    HAS_LONG_LISTS: ClassVar[bool] = True
    # Parameters that label a call, or choose what is done here anyway.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    user: str | None = None

    # vLLM's, under its names.
    request_id: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None

    # Ours.
    max_queue_time: float | None = None

    def options(self, tenant: str) -> CallOptions:
        """Returns what the body says of the call as a whole."""
        return CallOptions(
            request_id=self.request_id or "",
            model=self.model or "",
            tenant=tenant,
            priority=self.priority or 0,
            max_queue_seconds=self.max_queue_time,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            add_special_tokens=self.add_special_tokens is not False,
        )


class EmbeddingBody(PoolingBody):
    """The body of /v1/embeddings."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    # vLLM's.
    normalize: bool | None = None
    # Ours: a prompt of the model's files.
    prompt_name: str | None = None


class DocumentText(Shape):
    """A document as an object, in Cohere's and Jina's form."""

    text: str


class RerankBody(PoolingBody):
    """The body of /rerank, /v1/rerank and /v2/rerank."""

    query: str
    documents: Annotated[list[str | DocumentText], Field(min_length=1, fail_fast=True)]
    top_n: int | None = None
    return_documents: bool | None = None
    # Ours: what the query is for, for models that take it.
    instruction: str | None = None

    # Cohere's.
    max_chunks_per_doc: NotServed = None
    max_tokens_per_doc: NotServed = None
    rank_fields: Annotated[Any, Neutral(["text"])] = None


class ScoreBody(PoolingBody):
    """The body of /v1/score and /score: one text against several, or as many against as many."""

    text_1: Texts
    text_2: Texts
    # Ours.
    instruction: str | None = None


class ClassifyBody(PoolingBody):
    """The body of /classify. `use_activation` false: the head's numbers as they are."""

    input: Inputs
    use_activation: bool | None = None


class PoolingUsage(Shape):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingData(Shape):
    """A vector: numbers, or these as float32, little endian, in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Shape):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: PoolingUsage


class RerankResult(Shape):
    """A document. `document` is there if it was asked for."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class InputTokens(Shape):
    """The tokens of all pairs."""

    input_tokens: int


class RerankMeta(Shape):
    """What Cohere says of a call."""

    tokens: InputTokens


class RerankList(Shape):
    """The answer of /rerank, the best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
    meta: RerankMeta


class ScoreData(Shape):
    """How well a text answers."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(Shape):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: PoolingUsage


class ClassifyData(Shape):
    """The labels of an input."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyList(Shape):
    """The answer of /classify. `labels`: the names of all."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    labels: list[str]
    data: list[ClassifyData]
    usage: PoolingUsage
