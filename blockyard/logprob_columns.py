"""Cuts columns of log probabilities into one piece for each token, and joins the pieces again. Reads no number.

Gateway and scheduler keep each token's piece beside it; the messages between them, and a worker's answer, hold many.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from blockyard.common.v1 import sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Candidates(NamedTuple):
    """The log probabilities in one token's place: its own first, then the likeliest ones, best first. Columns
    of one length.

    `ranks` may be empty; 1 is the likeliest.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]


class PromptPiece(NamedTuple):
    """The log probabilities of a piece of a prompt: its message without the sequence."""

    first_position: int
    candidates: list[Candidates]


def split_logprobs(message: sampling_pb2.Logprobs) -> list[Candidates]:
    """One entry for each token."""
    token_ids, logprobs, ranks = message.token_ids[:], message.logprobs[:], message.ranks[:]
    entries: list[Candidates] = []
    start = 0
    for count in message.num_candidates:
        end = start + count
        entries.append(Candidates(token_ids[start:end], logprobs[start:end], ranks[start:end]))
        start = end
    return entries


def join_logprobs(entries: Iterable[Candidates]) -> sampling_pb2.Logprobs:
    """The columns of such entries."""
    rows = list(entries)
    return sampling_pb2.Logprobs(
        num_candidates=[len(entry.token_ids) for entry in rows],
        token_ids=itertools.chain.from_iterable(entry.token_ids for entry in rows),
        logprobs=itertools.chain.from_iterable(entry.logprobs for entry in rows),
        ranks=itertools.chain.from_iterable(entry.ranks for entry in rows),
    )


def split_prompt_logprobs(message: sampling_pb2.PromptLogprobs) -> PromptPiece:
    """A piece of a prompt."""
    return PromptPiece(message.first_position, split_logprobs(message.logprobs))


def encode_prompt_logprobs(sequence_id: int, piece: PromptPiece) -> sampling_pb2.PromptLogprobs:
    """The message of such a piece."""
    return sampling_pb2.PromptLogprobs(
        sequence_id=sequence_id, first_position=piece.first_position, logprobs=join_logprobs(piece.candidates)
    )
