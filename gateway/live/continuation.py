"""Checks the positions that a client sends, and rebuilds sequences from them if no server knows the request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from blockyard.contract.request import Position
from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import SequenceRecord, Submission
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.validation import find_foreign_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gateway.live.request_state import RequestState

_NOTHING = Position()
# The positions of a client that has no part of the answer.
NOWHERE: Mapping[int, Position] = MappingProxyType({})


def check_positions(positions: Mapping[int, Position], submission: Submission, vocab_size: int) -> None:
    """Raises BlockyardError FIELD_INVALID for positions that no answer to a request can have."""
    if violations := list(_find_violations(positions, submission, vocab_size)):
        raise invalid(violations)


def _find_violations(positions: Mapping[int, Position], submission: Submission, vocab_size: int) -> Iterator[Violation]:
    for index, position in positions.items():
        field = f"positions[{index}]"
        if index >= submission.n:
            yield Violation(f"{field}.index", f"must be below {submission.n}, the number of sequences, not {index}")
        if position.num_tokens > submission.max_tokens:
            yield Violation(
                f"{field}.num_tokens", f"is {position.num_tokens}, and max_tokens is {submission.max_tokens}"
            )
        if position.token_ids and len(position.token_ids) != position.num_tokens:
            description = f"must have num_tokens ({position.num_tokens}) ids or none, not {len(position.token_ids)}"
            yield Violation(f"{field}.token_ids", description)
        elif position.num_tokens <= submission.max_tokens:
            yield from find_foreign_ids(f"{field}.token_ids", position.token_ids, vocab_size)


def make_records(positions: Mapping[int, Position], submission: Submission) -> list[SequenceRecord]:
    """Makes a record of each sequence from the tokens that a client sent back; an empty list unless it sent all tokens.

    Without records the answer is generated from its beginning. Answers with log probabilities, which clients do not
    send back, and beam searches, which cannot continue from tokens, never get records.
    """
    have = [position for position in positions.values() if position.num_tokens]
    returns_more = submission.sampling.logprobs is not None or submission.beam_search is not None
    if not have or returns_more or not all(position.token_ids for position in have):
        return []
    known = (positions.get(index, _NOTHING).token_ids for index in range(submission.n))
    return [SequenceRecord(token_ids, _reason_of(token_ids, submission)) for token_ids in known]


def _reason_of(token_ids: Sequence[int], submission: Submission) -> FinishReason | None:
    """Returns why a sequence of these tokens has ended, or None. Stop strings are found later, in its text."""
    if len(token_ids) > submission.min_tokens and token_ids[-1] in submission.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) == submission.max_tokens else None


def make_changed_error() -> BlockyardError:
    """Makes the error for a client that has other tokens of an answer: it was lost, and is generated again."""
    message = "the answer was lost, and what is generated again differs from what was sent of it: send the request anew"
    return BlockyardError(Reason.REQUEST_EXPIRED, message)


def check_ends(positions: Mapping[int, Position], state: RequestState) -> None:
    """Raises BlockyardError FIELD_INVALID if a sequence that the client marks as finished has not ended."""
    wrong = [
        Violation(f"positions[{answer.index}].finished", "must be false, since these tokens do not end the sequence")
        for answer in state.answers
        if positions.get(answer.index, _NOTHING).finished and answer.ended is None
    ]
    if wrong:
        raise invalid(wrong)
