"""One step and its answer, as values. Knows no messages and no rows.

Sequence ids are Python integers, since they are keys; every other column is a numpy array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blockyard.contract.sampling import SamplingParams
from blockyard.lora.virtual_tokens import FIRST_VIRTUAL_ID

if TYPE_CHECKING:
    from blockyard.contract.pooling import Pooling
    from blockyard.contract.trace import TraceContext
    from blockyard.errors import BlockyardError

Array = npt.NDArray[np.int64]

# The most best tokens that may be asked for beside a token.
MAX_LOGPROBS = 20
# The most beams that a request may follow.
MAX_BEAMS = 32
# A list of thousands is useless; the status has to stay small.
MAX_VIOLATIONS = 16
# The time that a step may take unless the scheduler sets another.
DEFAULT_TIMEOUT_SECONDS = 3600.0

NO_IDS: Array = np.zeros(0, np.int64)
NO_IDS.setflags(write=False)


def no_ids() -> Array:
    """Returns the empty column. It is one array for all: most columns of most steps are empty."""
    return NO_IDS


@dataclass(frozen=True, slots=True, eq=False)
class NewRow:
    """Everything about a new sequence: `token_ids` are its prompt and the tokens generated so far."""

    sequence_id: int
    sequence_index: int
    token_ids: Array
    prompt_length: int
    num_computed_tokens: int
    block_ids: Array
    sampling: SamplingParams = SamplingParams()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_beam_candidates: int = 0
    trace_context: TraceContext | None = None
    request_id: str = ""
    lora_id: int = 0
    # The length of prompt and output at which the sequence ends. 0: it never drafts, and the scheduler alone ends it.
    max_length: int = 0
    pooling: Pooling | None = None
    # Whether the message has sampling parameters, which it must have.
    has_sampling: bool = True
    # The error with which this sequence alone fails.
    rejection: BlockyardError | None = None
    fixed_block_ids: Array = field(default_factory=no_ids)

    @property
    def num_virtual_tokens(self) -> int:
        """The number of ids that belong to a soft prompt: they are the first ids of the prompt."""
        return int(np.count_nonzero(self.token_ids >= FIRST_VIRTUAL_ID)) if self.lora_id else 0

    def reject(self, error: BlockyardError) -> NewRow:
        """Returns a sequence in its place that asks for nothing: its row computes nothing, and fails with the error."""
        return NewRow(
            self.sequence_id,
            self.sequence_index,
            token_ids=np.zeros(1, np.int64),
            prompt_length=1,
            num_computed_tokens=0,
            block_ids=self.block_ids,
            trace_context=self.trace_context,
            request_id=self.request_id,
            rejection=error,
            fixed_block_ids=self.fixed_block_ids,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ForkedRow:
    """A child that copies its parent's row."""

    parent_id: int
    child_id: int
    sequence_index: int
    block_ids: Array
    fixed_block_ids: Array = field(default_factory=no_ids)


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Blocks to read and blocks to write, in columns of the same length."""

    sources: Array = field(default_factory=no_ids)
    destinations: Array = field(default_factory=no_ids)

    def __len__(self) -> int:
        return len(self.sources)

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.sources.tolist(), self.destinations.tolist(), strict=True))


NO_PAIRS = BlockPairs()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The work of one step; worker.proto says what each field means, and in which order it is done.

    `decode_error` says why it was too large to be read. `timeout_seconds` counts from when it begins.
    """

    epoch: int
    step_id: int
    new_sequences: tuple[NewRow, ...] = ()
    forks: tuple[ForkedRow, ...] = ()
    sequence_ids: tuple[int, ...] = ()
    num_new_tokens: Array = field(default_factory=no_ids)
    appended_sequence_ids: tuple[int, ...] = ()
    appended_block_ids: Array = field(default_factory=no_ids)
    replaced_tables: tuple[tuple[int, Array], ...] = ()
    blocks_to_swap_out: BlockPairs = field(default_factory=BlockPairs)
    blocks_to_swap_in: BlockPairs = field(default_factory=BlockPairs)
    blocks_to_copy: BlockPairs = field(default_factory=BlockPairs)
    finished_sequence_ids: tuple[int, ...] = ()
    input_sequence_ids: tuple[int, ...] = ()
    input_token_ids: Array = field(default_factory=no_ids)
    decode_error: BlockyardError | None = None
    quiet: bool = False
    ids_from_scheduler: bool = False
    """Set in an epoch's first step: sampled ids are not appended here, but come back with the next steps."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    activated_lora_slots: Array = field(default_factory=no_ids)
    activated_lora_ids: Array = field(default_factory=no_ids)
    # For each of the sequences, how many tokens may be drafted; empty: none.
    max_draft_tokens: Array = field(default_factory=no_ids)
    # In thousandths of a token, what the step's first, second, … draft costs; empty: nothing.
    draft_prices: Array = field(default_factory=no_ids)
    # Sequences of replaced_tables whose fixed blocks change too, each with all of them.
    replaced_fixed_tables: tuple[tuple[int, Array], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """Candidates of tokens in columns: `num_candidates` [n] says how many of the others belong to each token in turn.

    `token_ids` int64, `logprobs` float32 and `ranks` int64 have one length; candidates of beams have no ranks.
    """

    num_candidates: Array = field(default_factory=no_ids)
    token_ids: Array = field(default_factory=no_ids)
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    ranks: Array = field(default_factory=no_ids)

    def __len__(self) -> int:
        return len(self.num_candidates)


NO_LOGPROBS = Logprobs()


@dataclass(frozen=True, slots=True, eq=False)
class PromptPieceLogprobs:
    """Log probabilities of the tokens of a sequence's prompt from `first_position` on."""

    sequence_id: int
    first_position: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """The results of sequences that pool and have computed their last token: float32 numbers [any] of each."""

    sequence_ids: tuple[int, ...] = ()
    values: tuple[npt.NDArray[np.float32], ...] = ()


NOTHING_POOLED = Pooled()


@dataclass(slots=True)
class StepTimes:
    """The seconds that the parts of a step took. `begun_at`: when the cache operations, the first part, began.

    Times are by time.perf_counter().
    """

    queue_seconds: float = 0.0
    cache_operations_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    begun_at: float = 0.0
    stage_wait_seconds: float = 0.0
    """The wait for the rows of the previous stage; not part of `forward_seconds`."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The answer to a step. With a `refusal` the step changed nothing and the columns are empty.

    With `draining` it is no answer: `step_id` is the step that was run last, and the rest is empty. The
    `digests` of inputs and outputs are 0 in a world of one. `num_tokens`: how many of `token_ids` belong to each of
    `sequence_ids`; empty: one each. `num_forced_tokens`: the drafts of grammars; `predictions`: (sequence id, drafts,
    right ones) of those that a request's prediction says.
    """

    epoch: int
    step_id: int
    sequence_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    skipped_sequence_ids: tuple[int, ...] = ()
    failures: tuple[tuple[int, BlockyardError], ...] = ()
    refusal: BlockyardError | None = None
    logprob_sequence_ids: tuple[int, ...] = ()
    logprobs: Logprobs = NO_LOGPROBS
    prompt_logprobs: tuple[PromptPieceLogprobs, ...] = ()
    beam_sequence_ids: tuple[int, ...] = ()
    beam_candidates: Logprobs = NO_LOGPROBS
    pooled: Pooled = NOTHING_POOLED
    draining: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    digests: tuple[int, int] = (0, 0)
    num_tokens: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    num_accepted_forced_tokens: int = 0
    predictions: tuple[tuple[int, int, int], ...] = ()
