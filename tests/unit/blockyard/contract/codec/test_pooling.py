"""Answers to calls for numbers, to messages and back."""

from __future__ import annotations

from array import array
from typing import Any

from blockyard.contract.codec.pooling import (
    decode_classifications,
    decode_embeddings,
    decode_scores,
    encode_classifications,
    encode_embeddings,
    encode_scores,
)
from blockyard.contract.events import Usage
from blockyard.contract.pooling import Classification, Classifications, Embeddings, ScoredDocument, Scores

FACTS: dict[str, Any] = {
    "request_id": "r",
    "model": "m",
    "usage": Usage(5, 2),
    "determinism_id": "d",
    "warnings": ("beware",),
}


def test_vectors_survive_whatever_holds_their_numbers() -> None:
    answer = Embeddings(vectors=[[0.5, -1.0], [2.0, 0.25]], **FACTS)
    assert decode_embeddings(encode_embeddings(answer)) == answer
    packed = Embeddings(vectors=[array("f", vector) for vector in answer.vectors], **FACTS)
    assert encode_embeddings(packed) == encode_embeddings(answer)


def test_scores_survive() -> None:
    answer = Scores(documents=[ScoredDocument(1, 0.5), ScoredDocument(0, -0.25)], **FACTS)
    assert decode_scores(encode_scores(answer)) == answer


def test_labels_survive() -> None:
    answer = Classifications(classifications=[Classification([0.25, 0.75], "b")], labels=["a", "b"], **FACTS)
    assert decode_classifications(encode_classifications(answer)) == answer
