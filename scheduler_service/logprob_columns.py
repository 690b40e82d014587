"""Columns of log probabilities, cut into one piece for each token and joined again. Nobody here reads the numbers.

The core keeps each token's piece beside it; a worker's answer and a gateway's message hold many in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.common.v1 import sampling_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable


class Candidates(NamedTuple):
    """What is told with one token: itself first, then the best ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class PromptPiece(NamedTuple):
    """What is told of a piece of a prompt, its message but for the sequence."""

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
    message = sampling_pb2.Logprobs()
    for token_ids, logprobs, ranks in entries:
        message.num_candidates.append(len(token_ids))
        message.token_ids.extend(token_ids)
        message.logprobs.extend(logprobs)
        message.ranks.extend(ranks)
    return message


def split_prompt_logprobs(message: sampling_pb2.PromptLogprobs) -> PromptPiece:
    """A piece of a prompt."""
    return PromptPiece(message.first_position, split_logprobs(message.logprobs))


def encode_prompt_logprobs(sequence_id: int, piece: PromptPiece) -> sampling_pb2.PromptLogprobs:
    """The message of such a piece."""
    return sampling_pb2.PromptLogprobs(
        sequence_id=sequence_id, first_position=piece.first_position, logprobs=join_logprobs(piece.candidates)
    )
