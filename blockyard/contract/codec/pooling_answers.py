"""Encodes and decodes the answers to calls for vectors, scores and labels."""

from __future__ import annotations

from typing import Any

from blockyard.contract.codec.events import decode_usage, encode_usage
from blockyard.contract.pooling_answers import (
    Classification,
    Classifications,
    Embeddings,
    PoolingFacts,
    ScoredDocument,
    Scores,
)
from blockyard.inference.v1 import inference_pb2


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
