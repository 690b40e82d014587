"""A loop that decodes step after step without Python, documented once for all backends.

Knows no messages and no sequence ids: steps and answers are records of words, whose order `StepRecord` and `StepAnswer`
give. Which steps may be decoded here is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """The sequences [n] of steps that differ only in their blocks and drafts, and the arrays of all rows.

    The loop reads and writes the arrays in place, so they must stay where they are while it runs.
    """

    vocab_size: int
    block_size: int
    num_kv_groups: int
    max_model_len: int
    max_num_blocks: int
    num_device_blocks: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    max_draft_rows: int
    progress: npt.NDArray[np.void]
    """[all rows]: num_tokens, num_computed_tokens, num_blocks and ended of each; written."""
    token_ids: npt.NDArray[np.int32]
    """[all rows, token_stride]; written."""
    token_stride: int
    block_tables: npt.NDArray[np.int32]
    """[all rows, table_stride]; written."""
    table_stride: int
    num_sequences: int
    rows: Integers
    """[n], as are the following: the row of each sequence."""
    prompt_lengths: Integers
    max_lengths: Integers
    """The length at which each sequence ends."""
    least_tokens: Integers
    """The tokens before which a stop token does not end a sequence."""
    stop_token_ids: Integers
    """[n, stop_width], filled up with -1."""
    stop_width: int
    waits: Flags
    """Whether a sequence's logits are edited until it has `least_tokens`: steps before are left."""
    may_draft: Flags
    """Whether a step may allow the sequence drafts."""
    temperatures: Floats
    """0: greedy. This and the following: see `blockyard_kernels.sampling.Choices`."""
    top_k: Integers
    top_p: Floats
    min_p: Floats
    seeds: Integers
    sequence_indexes: Integers
    refuses_drafts: Flags
    predicted: Integers
    """The address of the text that each sequence's request predicts, int32; 0: it predicts none."""
    num_predicted: Integers
    starts_over: Flags | None
    """[all rows]: those that compute their next token without drafts; written. None: nothing is drafted."""
    tried: Doubles | None
    """[all rows, num_kinds, num_places]: drafts that were computed, by kind and place in their run; written."""
    right: Doubles | None
    """Those of them that were right; written."""
    prior: Doubles
    """[num_kinds, num_places]: the chance that a draft is right before any was tried."""
    kind_bounds: Integers
    """[num_kinds - 2]: the least lengths of a match for the second kind and those behind it; the last is another's."""
    num_kinds: int
    num_places: int
    prior_weight: float
    decay: float
    price_unit: float
    """Prices are in parts of a token: so many are one."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """A step for the loop. `number` names it; `arrival` is by time.perf_counter()."""

    number: int
    step_id: int
    arrival: float
    appended_places: Integers
    """The place among the n sequences of each block that is appended."""
    appended_blocks: Integers
    max_draft_tokens: Integers
    """[n], or empty: nothing is drafted."""
    draft_prices: Integers

    def words(self) -> Integers:
        """Encodes the record as csrc/decode_loop.h reads it."""
        columns = self.appended_places, self.appended_blocks, self.max_draft_tokens, self.draft_prices
        sizes = map(len, columns[1:])
        arrival = int(np.float64(self.arrival).view(np.int64))
        head = np.array((self.number, self.step_id, arrival, *sizes), np.int64)
        return np.concatenate((head, *columns))


NUM_ANSWER_WORDS = 7


@dataclass(frozen=True, slots=True, eq=False)
class StepAnswer:
    """The answer to the step `number`. Times are in seconds; `begun_at` is by time.perf_counter()."""

    number: int
    queue_seconds: float
    begun_at: float
    forward_seconds: float
    sample_seconds: float
    num_drafts: int
    counts: tuple[int, ...]
    """[n]: how many of the tokens each sequence has; -1: it had ended before."""
    token_ids: tuple[int, ...]
    predictions: tuple[tuple[int, int, int], ...] = ()
    """Place, drafts and right drafts of each sequence whose drafts its request predicts."""

    @classmethod
    def of(cls, words: Integers) -> StepAnswer:
        number, *_, num_drafts, num_sequences = words[:NUM_ANSWER_WORDS].tolist()
        queue_seconds, begun_at, forward_seconds, sample_seconds = words[1:5].view(np.float64).tolist()
        times = float(queue_seconds), float(begun_at), float(forward_seconds), float(sample_seconds)
        numbers = words[NUM_ANSWER_WORDS:].tolist()
        counts = tuple(numbers[:num_sequences])
        end = num_sequences + sum(max(each, 0) for each in counts)
        rest = iter(numbers[end:])
        predictions = tuple(zip(rest, rest, rest, strict=True))
        return cls(number, *times, num_drafts, counts, tuple(numbers[num_sequences:end]), predictions)


class DecodeLoop(Protocol):
    """The loop over one captured step. `run` is for the device's thread; no other method waits for it."""

    @property
    def event(self) -> int:
        """A file descriptor that can be read when there is an answer: see eventfd(2)."""
        ...

    def open(self, rows: DecodeRows, last_step_id: int, first: Integers) -> None:
        """Takes records from now on, of which this is the first; `last_step_id` is that of the step before it."""

    def run(self) -> tuple[int, list[int]]:
        """Runs steps until the loop is ended, or a step must be run by Python.

        Such a step has changed nothing: it is not steady, must be refused, or has logits that are not finite.

        Returns:
            The id of the last step that was run, and the numbers of the records that were not, in order.
        """
        ...

    def push(self, record: Integers) -> bool:
        """Adds a record, and returns whether it was taken: not if the loop is not open, or ends."""
        ...

    def end(self, *, drops: bool = False) -> None:
        """Takes no more records. Those that wait are run or, if it `drops` them, left."""

    def tell(self, number: int) -> None:
        """Puts a number among the answers, in its turn. Any thread may call it."""

    def take(self) -> StepAnswer | int | None:
        """Returns the next answer, or the next number of `tell`; None: there is none."""
        ...
