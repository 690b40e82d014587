"""The forward batch: what one step computes, resolved to rows. Knows neither what rows hold nor how to compute them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from worker_service.step import NO_IDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from blockyard.errors import BlockyardError
    from worker_service.batch.step_layout import StepLayout
    from worker_service.pooling.rows import PoolingRequest
    from worker_service.step import Array, Step


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Prompt tokens whose log probabilities a step can compute, since it computes what stands before them.

    `token_ids` [n] stand in the prompt from `first_position` on; the hidden row of the first is `first_hidden`. Each
    gets the log probabilities of the `num_best` likeliest tokens too.
    """

    sequence_id: int
    first_position: int
    token_ids: Array
    first_hidden: int
    num_best: int


@dataclass(frozen=True, slots=True)
class PooledPiece:
    """Hidden rows of a sequence that pools: `num_rows` from `first_hidden` on; `is_due`: the last one is among them."""

    sequence_id: int
    row: int
    request: PoolingRequest
    first_hidden: int
    num_rows: int
    is_due: bool


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """What a step computes: its layout, and the columns that are its own.

    `seq_lens` int64 [C], `block_tables` int32 [groups * C, widest], those of one KV group after those of another, and
    `token_ids` int64 [T] feed the forward pass, together with the layout's `num_new_tokens`; each is contiguous.
    `computed_lengths` are those of the layout's `computed_rows`. `rejections` are sequences of the step, among the
    layout's `skipped_ids`, that fail, and why. Two steps may share a layout: nobody writes to its arrays.
    """

    layout: StepLayout
    seq_lens: Array
    block_tables: npt.NDArray[np.int32]
    token_ids: Array
    prompts: tuple[PromptRows, ...]
    computed_lengths: Array
    pooled: tuple[PooledPiece, ...] = ()
    rejections: tuple[tuple[int, BlockyardError], ...] = ()

    @property
    def pooled_rows(self) -> Array:
        """The rows of the sequences of which all is computed, of a model that pools."""
        return np.array([piece.row for piece in self.pooled if piece.is_due], np.int64) if self.pooled else NO_IDS

    @property
    def num_new_tokens(self) -> Array:
        """[C]: tokens that the step computes of each sequence."""
        return self.layout.num_new_tokens


def find_pooled(
    step: Step, layout: StepLayout, lengths: Array, num_tokens: Array, requests: Mapping[int, PoolingRequest]
) -> tuple[PooledPiece, ...]:
    """Finds the hidden rows of sequences that pool.

    Args:
        step: whose changes were applied.
        layout: of it.
        lengths: [n], of the step's sequences after it.
        num_tokens: of all rows.
        requests: of the rows that have one; where there are none, none of the step's has.
    """
    if not requests:
        return ()
    return tuple(
        PooledPiece(
            step.sequence_ids[place],
            row := int(layout.step_rows[place]),
            requests[row],
            int(layout.last_hidden[place] + 1 - step.num_new_tokens[place]),
            int(step.num_new_tokens[place]),
            bool(lengths[place] == num_tokens[row]),
        )
        for place in layout.computing.tolist()
    )


def find_rejections(step: Step, rejections: Mapping[int, BlockyardError]) -> tuple[tuple[int, BlockyardError], ...]:
    """Finds the sequences of a step that were rejected, and why; `rejections`: of all that have a row."""
    if not rejections:
        return ()
    return tuple((each, rejections[each]) for each in step.sequence_ids if each in rejections)


def divide_tables(tables: npt.NDArray[np.int32], num_groups: int) -> npt.NDArray[np.int32]:
    """Divides tables [n, width * groups] by KV groups -> [groups * n, width], contiguous."""
    if num_groups == 1:
        return tables
    count, width = len(tables), tables.shape[1] // num_groups
    by_group = tables.reshape(count, width, num_groups).transpose(2, 0, 1)
    return np.ascontiguousarray(by_group).reshape(num_groups * count, width)
