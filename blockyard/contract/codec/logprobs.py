"""Splits columns of log probabilities into one entry for each token, and joins the entries again.

Gateway and scheduler keep an entry beside each token; a message between them, and a worker's answer, holds many.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.logprobs import Candidates, PromptPiece

if TYPE_CHECKING:
    from collections.abc import Iterable


def split_logprobs(message: sampling_pb2.Logprobs) -> list[Candidates]:
    """Splits columns into one entry for each token."""
    token_ids, logprobs, ranks = message.token_ids[:], message.logprobs[:], message.ranks[:]
    entries: list[Candidates] = []
    start = 0
    for count in message.num_candidates:
        end = start + count
        entries.append(Candidates(token_ids[start:end], logprobs[start:end], ranks[start:end]))
        start = end
    return entries


def join_logprobs(entries: Iterable[Candidates]) -> sampling_pb2.Logprobs:
    """Joins entries to columns."""
    rows = list(entries)
    return sampling_pb2.Logprobs(
        num_candidates=[len(entry.token_ids) for entry in rows],
        token_ids=itertools.chain.from_iterable(entry.token_ids for entry in rows),
        logprobs=itertools.chain.from_iterable(entry.logprobs for entry in rows),
        ranks=itertools.chain.from_iterable(entry.ranks for entry in rows),
    )


def split_prompt_logprobs(message: sampling_pb2.PromptLogprobs) -> PromptPiece:
    """Decodes the log probabilities of a piece of a prompt."""
    return PromptPiece(message.first_position, split_logprobs(message.logprobs))


def encode_prompt_logprobs(sequence_id: int, piece: PromptPiece) -> sampling_pb2.PromptLogprobs:
    """Encodes the log probabilities of a piece of a sequence's prompt."""
    return sampling_pb2.PromptLogprobs(
        sequence_id=sequence_id, first_position=piece.first_position, logprobs=join_logprobs(piece.candidates)
    )
