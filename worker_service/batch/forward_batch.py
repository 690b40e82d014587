"""What a step computes, resolved to rows of the input batch. Knows neither what rows hold nor how they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from worker_service.batch.row_requests import RowRequests
    from worker_service.step import Array


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """Some rows of a step: whose they are, which of the step's T hidden rows is the last of each, what they ask for."""

    sequence_ids: tuple[int, ...]
    rows: Array
    last_hidden: Array
    requests: RowRequests

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, chosen: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        """Gives the sequences of some of them."""
        return tuple(compress(self.sequence_ids, chosen.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class PromptPiece:
    """Tokens of a prompt that a step can tell the log probabilities of, since it computes what stands before them.

    `token_ids` [n] stand in the prompt from `first_position` on; hidden row `first_hidden` tells of the first of them.
    `num_best` tokens are told of beside each.
    """

    sequence_id: int
    first_position: int
    token_ids: Array
    first_hidden: int
    num_best: int


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """What a step computes, resolved to rows: C sequences compute tokens.

    `rows`, `num_new_tokens`, `seq_lens` int64 [C], `block_tables` int32 [C, widest] and `token_ids` int64 [T] feed the
    forward pass; each is contiguous. `sampled` rows get a token, of `beams` candidates are told, of `prompts` log
    probabilities. `computed_rows` and `computed_lengths` are those of `rows` and of children without tokens of their
    own. Columns that two steps have in common are the same arrays: nobody writes to them.
    """

    rows: Array
    num_new_tokens: Array
    seq_lens: Array
    block_tables: npt.NDArray[np.int32]
    token_ids: Array
    sampled: StepRows
    beams: StepRows
    prompts: tuple[PromptPiece, ...]
    computed_rows: Array
    computed_lengths: Array
    skipped_ids: tuple[int, ...]
