"""Decodes the optional columns of an answer: log probabilities, candidates of beams, pooled numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blockyard.contract.codec.pooling import split_values
from blockyard.contract.codec.sampling import split_logprobs, split_prompt_logprobs
from scheduler_service.replicas.steps.answer_checks import (
    check_distinct,
    check_pooled,
    check_prompt,
    check_rows,
    check_tokens,
    require,
)

if TYPE_CHECKING:
    from blockyard.common.v1.sampling_pb2 import Logprobs
    from blockyard.contract.sampling import Candidates, PromptPiece
    from blockyard.worker.v1.worker_pb2 import ExecuteModelResponse
    from scheduler_service.replicas.steps.answer_checks import AnswerLimits

# A log probability of 0 may be rounded to slightly above 0.
_MAX_LOGPROB = 0.1


def has_logprobs(message: ExecuteModelResponse) -> bool:
    return len(message.logprob_sequence_ids) > 0 or message.HasField("logprobs")


def decode_logprobs(message: ExecuteModelResponse, limits: AnswerLimits) -> tuple[tuple[int, Candidates], ...]:
    """Decodes (sequence id, log probabilities) of what was sampled, in the order of the tokens. Raises WrongAnswer."""
    sequence_ids = message.logprob_sequence_ids
    # Each sequence has one token, and one more for each draft that was right.
    check_rows("logprob_sequence_ids", sequence_ids, limits._replace(max_rows=limits.max_rows + limits.max_draft_rows))
    check_tokens("logprob_sequence_ids", sequence_ids[:], limits)
    _check_logprobs("logprobs", message.logprobs, len(sequence_ids), limits)
    return tuple(zip(sequence_ids[:], split_logprobs(message.logprobs), strict=True))


def _check_logprobs(name: str, columns: Logprobs, num_entries: int, limits: AnswerLimits, least: int = 1) -> None:
    """Checks columns of log probabilities of `num_entries` tokens, each with `least` candidates or more."""
    counts, token_ids, logprobs, ranks = columns.num_candidates, columns.token_ids, columns.logprobs, columns.ranks
    require(len(counts) == num_entries, f"{name}: {len(counts)} entries, not {num_entries}")
    require(not counts or min(counts) >= least, f"{name}: an entry has no token")
    columns_fit = sum(counts) == len(token_ids) == len(logprobs) and len(ranks) in (0, len(token_ids))
    require(columns_fit, f"{name}: the columns have different lengths")
    if not token_ids:
        return
    require(
        max(token_ids) < limits.vocab_size,
        f"{name}: token id {max(token_ids)} is not in the vocabulary of {limits.vocab_size}",
    )
    # A sum is NaN if anything in it is.
    require(
        not math.isnan(sum(logprobs)) and max(logprobs) <= _MAX_LOGPROB, f"{name}: a value is not a log probability"
    )


def has_candidates(message: ExecuteModelResponse) -> bool:
    return len(message.beam_sequence_ids) > 0 or message.HasField("beam_candidates")


def decode_candidates(message: ExecuteModelResponse, limits: AnswerLimits) -> dict[int, tuple[tuple[int, float], ...]]:
    """Decodes the likeliest tokens of each beam, best first. Raises WrongAnswer."""
    check_rows("beam_sequence_ids", message.beam_sequence_ids, limits)
    sequence_ids = message.beam_sequence_ids[:]
    check_distinct("beam_sequence_ids", sequence_ids)
    # A beam without a possible token has no candidates.
    _check_logprobs("beam_candidates", message.beam_candidates, len(sequence_ids), limits, least=0)
    entries = split_logprobs(message.beam_candidates)
    return {
        sequence_id: tuple(zip(entry.token_ids, entry.logprobs, strict=True))
        for sequence_id, entry in zip(sequence_ids, entries, strict=True)
    }


def decode_prompts(message: ExecuteModelResponse, limits: AnswerLimits) -> tuple[tuple[int, PromptPiece], ...]:
    """Decodes the log probabilities of pieces of prompts. Raises WrongAnswer."""
    pieces = message.prompt_logprobs
    check_rows("prompt_logprobs", pieces, limits)
    check_distinct("prompt_logprobs", [piece.sequence_id for piece in pieces])
    for piece in pieces:
        num_entries = len(piece.logprobs.num_candidates)
        check_prompt(piece.first_position, num_entries, limits)
        _check_logprobs("prompt_logprobs", piece.logprobs, num_entries, limits)
    return tuple((piece.sequence_id, split_prompt_logprobs(piece)) for piece in pieces)


def decode_pooled(message: ExecuteModelResponse, limits: AnswerLimits) -> tuple[tuple[int, bytes], ...]:
    """Decodes pooled numbers, as the bytes of each sequence. Raises WrongAnswer."""
    check_rows("pooled_sequence_ids", message.pooled_sequence_ids, limits)
    sequence_ids = message.pooled_sequence_ids[:]
    check_distinct("pooled_sequence_ids", sequence_ids)
    check_pooled(message.pooled_sizes, len(sequence_ids), message.pooled_values)
    return tuple(zip(sequence_ids, split_values(message.pooled_sizes, message.pooled_values), strict=True))
