"""A drafter that does whatever a drafter may do: right and wrong tokens, none, fewer or as many as are allowed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tests.kit.oracles import model_worker

if TYPE_CHECKING:
    from tests.kit.oracles.model_worker import Row


class HostileDrafter:
    """Draws from the step and the sequence alone, so that all ranks of a group draft the same.

    `right`: the share of drafts that are the very tokens; `again`: of the runs that must be computed again.
    """

    def __init__(self, seed: int = 0, *, right: float = 0.75, again: float = 1 / 16) -> None:
        self._seed = seed
        self._right = right
        self._again = again

    def draft(self, step_id: int, row: Row, seed: int, vocab_size: int, most: int) -> list[int]:
        """Drafts tokens behind the last known one; `seed`: of the row's own draws."""
        draw = self._random(step_id, row)
        position, name = len(row.token_ids) - row.prompt_length, row.names[-1]
        drafts: list[int] = []
        for place in range(position, position + draw.randint(0, most)):
            masked = row.spec.stop_token_ids if place < row.spec.min_tokens else ()
            right = model_worker.sample(seed, row.sequence_index, place, name, vocab_size, masked)
            drafts.append(right if draw.random() < self._right else draw.randrange(vocab_size))
            name = model_worker.extend_name(name, drafts[-1])
        return drafts

    def must_repeat(self, step_id: int, row: Row) -> bool:
        """Whether a run with drafts gives nothing, as one whose numbers are not finite."""
        return self._random(-step_id, row).random() < self._again

    def _random(self, step_id: int, row: Row) -> Random:
        return Random(hash((self._seed, step_id, row.names[-1], row.sequence_index)))
