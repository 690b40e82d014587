"""One step and its answer, as values. Knows no messages and no rows.

Sequence ids are Python integers, since they are keys; every other column is a numpy array.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blockyard.lora.virtual_tokens import FIRST_VIRTUAL_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.errors import BlockyardError
    from blockyard.model_config.pooling.rule import PoolingKind
    from blockyard.tracing.spans import TraceContext

Array = npt.NDArray[np.int64]

# The most best tokens that may be asked for beside a token.
MAX_LOGPROBS = 20
# The most beams that a request may follow.
MAX_BEAMS = 32
# A list of thousands helps nobody; the status has to stay small.
MAX_VIOLATIONS = 16
# How long a step may take where nobody says.
DEFAULT_TIMEOUT_SECONDS = 3600.0

NO_IDS: Array = np.zeros(0, np.int64)
NO_IDS.setflags(write=False)


def no_ids() -> Array:
    """Returns the empty column. It is one array for all: most columns of most steps are empty."""
    return NO_IDS


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a sequence are chosen; the defaults change nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that the sequence already has are penalized."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Pooling:
    """What to make of a sequence instead of more tokens; see pooling.proto."""

    kind: PoolingKind | None
    """None: one that this worker does not know."""
    label_token_ids: tuple[int, ...] = ()
    normalise: bool = False
    dimensions: int = 0
    leaves_raw: bool = False
    second_from: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class NewSequence:
    """Everything about a sequence: `token_ids` are its prompt and what was generated so far."""

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
    pooling: Pooling | None = None
    # Whether it came with sampling parameters, as it should.
    has_sampling: bool = True
    # Why it fails alone, whatever else it has.
    rejection: BlockyardError | None = None

    @property
    def num_virtual_tokens(self) -> int:
        """How many ids are those of a soft prompt: they stand first, in the prompt."""
        return int(np.count_nonzero(self.token_ids >= FIRST_VIRTUAL_ID)) if self.lora_id else 0

    def reject(self, error: BlockyardError) -> NewSequence:
        """Returns a sequence in its place that asks for nothing: its row computes nothing, and fails with the error."""
        return NewSequence(
            self.sequence_id,
            self.sequence_index,
            token_ids=np.zeros(1, np.int64),
            prompt_length=1,
            num_computed_tokens=0,
            block_ids=self.block_ids,
            trace_context=self.trace_context,
            request_id=self.request_id,
            rejection=error,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """A child that copies its parent's row."""

    parent_id: int
    child_id: int
    sequence_index: int
    block_ids: Array


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """Blocks to read and blocks to write, in columns of the same length."""

    sources: Array = field(default_factory=no_ids)
    destinations: Array = field(default_factory=no_ids)

    def __len__(self) -> int:
        return len(self.sources)

    def pairs(self) -> list[tuple[int, int]]:
        """The (source, destination) pairs."""
        return list(zip(self.sources.tolist(), self.destinations.tolist(), strict=True))


NO_PAIRS = BlockPairs()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The work of one step; worker.proto says what each field means, and in which order it is done.

    `decode_error` says why it was too large to be read. `timeout_seconds` counts from when it begins.
    """

    epoch: int
    step_id: int
    new_sequences: tuple[NewSequence, ...] = ()
    forks: tuple[Fork, ...] = ()
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
    """Of an epoch's first step: nothing that is sampled is appended here, the next steps bring it."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    activated_lora_slots: Array = field(default_factory=no_ids)
    activated_lora_ids: Array = field(default_factory=no_ids)


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
class PromptLogprobs:
    """Log probabilities of the tokens of a sequence's prompt from `first_position` on."""

    sequence_id: int
    first_position: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """What was made of sequences that computed their last token: float32 numbers [any] of each."""

    sequence_ids: tuple[int, ...] = ()
    values: tuple[npt.NDArray[np.float32], ...] = ()


NOTHING_POOLED = Pooled()


@dataclass(slots=True)
class StepTimes:
    """How long the parts of a step took, in seconds. `begun_at`: when the first of them, the cache operations, began.

    By time.perf_counter().
    """

    queue_seconds: float = 0.0
    cache_operations_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    begun_at: float = 0.0
    stage_wait_seconds: float = 0.0
    """For the rows of the stage before; no part of the forward pass."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answer to a step. With a `refusal` the step changed nothing and the columns are empty.

    With `draining` it is no answer: `step_id` is the step that was run last, and the rest is empty. The
    `digests` of inputs and outputs are 0 in a world of one.
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
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    beam_sequence_ids: tuple[int, ...] = ()
    beam_candidates: Logprobs = NO_LOGPROBS
    pooled: Pooled = NOTHING_POOLED
    draining: bool = False
    times: StepTimes = field(default_factory=StepTimes)
    digests: tuple[int, int] = (0, 0)
