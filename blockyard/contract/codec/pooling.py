"""Encodes and decodes poolings, their answers, and columns of pooled numbers: sizes, and one string of float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import pooling_pb2
from blockyard.contract.codec.events import decode_usage, encode_usage
from blockyard.contract.codec.messages import EnumCodec
from blockyard.contract.pooling import (
    Classification,
    Classifications,
    Embeddings,
    Pooling,
    PoolingFacts,
    PoolingKind,
    ScoredDocument,
    Scores,
)
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FLOAT_BYTES = 4
_KINDS = EnumCodec(PoolingKind, pooling_pb2.PoolingKind.items(), "POOLING_KIND_")


def encode_pooling(pooling: Pooling) -> pooling_pb2.Pooling:
    return pooling_pb2.Pooling(
        kind=_KINDS.encode(pooling.kind) if pooling.kind else pooling_pb2.POOLING_KIND_UNSPECIFIED,
        label_token_ids=pooling.label_token_ids,
        normalise=pooling.normalise,
        dimensions=pooling.dimensions,
        leaves_raw=pooling.leaves_raw,
        second_from=pooling.second_from,
    )


def decode_pooling(message: pooling_pb2.Pooling) -> Pooling:
    """Decodes what to make of a prompt; checks nothing."""
    return Pooling(
        kind=_KINDS.find(message.kind),
        label_token_ids=tuple(message.label_token_ids[:]),
        normalise=message.normalise,
        dimensions=message.dimensions,
        leaves_raw=message.leaves_raw,
        second_from=message.second_from,
    )


def split_values(sizes: Iterable[int], values: bytes) -> list[bytes]:
    """Splits numbers, little endian, into those of each sequence, of which there are `sizes`."""
    ends = list(itertools.accumulate((FLOAT_BYTES * size for size in sizes), initial=0))
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def join_values(each: Sequence[bytes]) -> tuple[list[int], bytes]:
    """Joins the numbers of several sequences: returns how many each has, and all of them."""
    return [len(values) // FLOAT_BYTES for values in each], b"".join(each)


def encode_embeddings(answer: Embeddings) -> inference_pb2.EmbedResponse:
    return inference_pb2.EmbedResponse(
        embeddings=[inference_pb2.Embedding(values=vector) for vector in answer.vectors], facts=_encode_facts(answer)
    )


def decode_embeddings(message: inference_pb2.EmbedResponse) -> Embeddings:
    return Embeddings(vectors=[list(each.values) for each in message.embeddings], **_decode_facts(message.facts))


def encode_scores(answer: Scores) -> inference_pb2.ScoreResponse:
    documents = [inference_pb2.ScoredDocument(index=each.index, score=each.score) for each in answer.documents]
    return inference_pb2.ScoreResponse(documents=documents, facts=_encode_facts(answer))


def decode_scores(message: inference_pb2.ScoreResponse) -> Scores:
    documents = [ScoredDocument(each.index, each.score) for each in message.documents]
    return Scores(documents=documents, **_decode_facts(message.facts))


def encode_classifications(answer: Classifications) -> inference_pb2.ClassifyResponse:
    return inference_pb2.ClassifyResponse(
        classifications=[
            inference_pb2.Classification(probabilities=each.probabilities, label=each.label)
            for each in answer.classifications
        ],
        labels=answer.labels,
        facts=_encode_facts(answer),
    )


def decode_classifications(message: inference_pb2.ClassifyResponse) -> Classifications:
    each = [Classification(list(one.probabilities), one.label) for one in message.classifications]
    return Classifications(classifications=each, labels=list(message.labels), **_decode_facts(message.facts))


def _encode_facts(facts: PoolingFacts) -> inference_pb2.PoolingFacts:
    return inference_pb2.PoolingFacts(
        request_id=facts.request_id,
        model=facts.model,
        usage=encode_usage(facts.usage),
        determinism_id=facts.determinism_id,
        warnings=facts.warnings,
    )


def _decode_facts(message: inference_pb2.PoolingFacts) -> dict[str, Any]:
    return {
        "request_id": message.request_id,
        "model": message.model,
        "usage": decode_usage(message.usage),
        "determinism_id": message.determinism_id,
        "warnings": tuple(message.warnings),
    }
