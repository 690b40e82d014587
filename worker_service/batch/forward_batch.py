"""The forward batch: what one step computes, resolved to rows. Knows neither what rows hold nor how to compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from worker_service.batch.step_layout import StepLayout
    from worker_service.step import Array


@dataclass(frozen=True, slots=True, eq=False)
class PromptPiece:
    """Prompt tokens whose log probabilities a step can compute, since it computes what stands before them.

    `token_ids` [n] stand in the prompt from `first_position` on; the hidden row of the first is `first_hidden`. Each
    gets the log probabilities of the `num_best` likeliest tokens too.
    """

    sequence_id: int
    first_position: int
    token_ids: Array
    first_hidden: int
    num_best: int


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """What a step computes: its layout, and the columns that are its own.

    `seq_lens` int64 [C], `block_tables` int32 [C, widest] and `token_ids` int64 [T] feed the forward pass, together
    with the layout's `num_new_tokens`; each is contiguous. `computed_lengths` are those of the layout's
    `computed_rows`. Two steps may share a layout: nobody writes to its arrays.
    """

    layout: StepLayout
    seq_lens: Array
    block_tables: npt.NDArray[np.int32]
    token_ids: Array
    prompts: tuple[PromptPiece, ...]
    computed_lengths: Array

    @property
    def num_new_tokens(self) -> Array:
        """[C]: tokens that the step computes of each sequence."""
        return self.layout.num_new_tokens
