"""The bodies of embeddings, reranking, scores and labels, in the forms of OpenAI, Cohere, Jina and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape
from gateway.pooling_calls import CallOptions

TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = str | Annotated[list[str], Field(min_length=1, fail_fast=True)]
Inputs = Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]


class PoolingBody(Shape):
    """The fields that all pooling calls share."""

    HAS_LONG_LISTS: ClassVar[bool] = True
    # Parameters that only label a call.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    user: str | None = None

    # vLLM's parameters, under its names.
    request_id: str | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None

    # Blockyard's own parameter.
    max_queue_time: float | None = None

    def options(self, tenant: str) -> CallOptions:
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
    # vLLM's parameter.
    normalize: bool | None = None
    # Blockyard's own parameter: the name of a prompt in the model's files.
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
    # Blockyard's own parameter: the purpose of the query, for models that take an instruction.
    instruction: str | None = None

    # Cohere's parameters.
    max_chunks_per_doc: NotServed = None
    max_tokens_per_doc: NotServed = None
    rank_fields: Annotated[Any, Neutral(["text"])] = None


class ScoreBody(PoolingBody):
    """The body of /v1/score and /score: one text against several, or two lists of the same length."""

    text_1: Texts
    text_2: Texts
    # Blockyard's own parameter.
    instruction: str | None = None


class ClassifyBody(PoolingBody):
    """The body of /classify. If `use_activation` is false, the answer has the head's raw logits."""

    input: Inputs
    use_activation: bool | None = None
