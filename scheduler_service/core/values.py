"""The core's inputs and outputs: frozen values. Knows nothing of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.contract.scheduling import TokenUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.contract.sampling import BeamSearch
    from blockyard.contract.scheduling import SequenceError


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """An adapter. `lora_id`: from 1 on, never used again; `digest`: the SHA-256 of its content."""

    lora_id: int
    digest: bytes
    name: str = ""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A request, validated: `n` sequences that share a prompt.

    `owner`: the gateway that gets the tokens. `payload`: the sampling parameters, which go unread to the worker.
    `computes_prompt`: the whole prompt is computed, even if it is cached, for its log probabilities. `priority`: lower
    is sooner. `beams`: the sequences are the `n` best of a beam search instead of samples. `trace_context`: goes unread
    to the worker. `lora`: the adapter of all sequences. `pooling`: how to pool the prompt into numbers instead of
    generating, also unread; None: the request generates. `cache_salt`: only requests with the same salt share blocks of
    the prefix cache.
    """

    request_id: str
    owner: str
    prompt_token_ids: Sequence[int]
    n: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    payload: Any = None
    computes_prompt: bool = False
    tenant: str = ""
    priority: int = 0
    beams: BeamSearch | None = None
    trace_context: Any = None
    lora: LoraSpec | None = None
    pooling: bytes | None = None
    cache_salt: bytes = b""

    @property
    def lora_id(self) -> int:
        """The adapter's number; 0: none."""
        return self.lora.lora_id if self.lora else 0

    @property
    def num_beam_candidates(self) -> int:
        """Tokens that each beam proposes, as in transformers: enough that a beam's width of them are no stop tokens."""
        return max(2, 1 + len(self.stop_token_ids)) * self.beams.width if self.beams else 0

    @property
    def num_rows(self) -> int:
        """Most rows of a step that the request needs at once."""
        return self.beams.width if self.beams else self.n

    @property
    def num_sequence_ids(self) -> int:
        """Sequence ids that the request needs: its own, and two for each beam (present and just dropped)."""
        return self.n + 2 * self.beams.width if self.beams else self.n


class BlockPair(NamedTuple):
    """A block to read and a block to write."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker does not have, with all that it needs to know. `token_ids`: prompt, then output.

    `num_beam_candidates`: if not 0, the worker answers this many of the likeliest tokens instead of sampling.
    `max_length`: the length at which it ends, for a worker that may draft; 0: it never drafts.
    `fixed_block_ids`: blocks that it has to its end, if the model has layers with a state.
    """

    sequence_id: int
    sequence_index: int
    token_ids: Sequence[int]
    prompt_length: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    spec: GroupSpec
    num_beam_candidates: int = 0
    max_length: int = 0
    fixed_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """A child that copies its parent's row on the worker."""

    parent_id: int
    child_id: int
    sequence_index: int
    block_ids: tuple[int, ...]
    fixed_block_ids: tuple[int, ...] = ()


class SchedulerOutput(NamedTuple):
    """One step: the fields of `ExecuteModelRequest` except the epoch. Columns that belong together have one length.

    `input_ids`: (sequence id, token id) of sequences that decode a token which the worker did not choose.
    `activated_loras`: (slot, adapter) of adapters that are put into a slot before the step is computed.
    `max_draft_tokens`: for each of `sequence_ids` how many tokens the worker may draft; empty: none. `draft_prices`: in
    thousandths of a token, what each further draft of the step costs; empty: nothing. `replaced_fixed_tables`: of those
    of `replaced_tables` that have other fixed blocks than before.
    """

    step_id: int
    new_sequences: tuple[NewSequence, ...] = ()
    forks: tuple[Fork, ...] = ()
    sequence_ids: tuple[int, ...] = ()
    num_new_tokens: tuple[int, ...] = ()
    appended_sequence_ids: tuple[int, ...] = ()
    appended_block_ids: tuple[int, ...] = ()
    replaced_tables: tuple[tuple[int, tuple[int, ...]], ...] = ()
    blocks_to_swap_out: tuple[BlockPair, ...] = ()
    blocks_to_swap_in: tuple[BlockPair, ...] = ()
    blocks_to_copy: tuple[BlockPair, ...] = ()
    finished_sequence_ids: tuple[int, ...] = ()
    input_ids: tuple[tuple[int, int], ...] = ()
    activated_loras: tuple[tuple[int, int], ...] = ()
    max_draft_tokens: tuple[int, ...] = ()
    draft_prices: tuple[int, ...] = ()
    replaced_fixed_tables: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The worker's answer: sampled ids in columns, skipped sequences, and failed ones (id, error).

    `num_tokens`: how many of `token_ids` each sequence has, one sequence after the other; empty: one each. 0: its last
    known token has to be computed again. `num_draft_tokens` were drafted, `num_accepted_tokens` of them were right;
    `num_forced_tokens` and `num_accepted_forced_tokens` of these by a grammar, and of `predictions` (sequence id,
    drafts, right ones) by what the request predicts.
    `logprobs`: (sequence id, those of one token) in the order of the tokens; `prompt_logprobs`: those of a piece of a
    prompt. The core passes both on unread. `beam_candidates`: the likeliest (token id, log probability) of each beam,
    best first. `pooled`: (sequence id, numbers) in the order of the step; the numbers are float32, little endian,
    unread. `forward_seconds` (with sampling) and `cache_seconds` (swaps and copies): how long the worker was busy; 0:
    it does not say.
    """

    step_id: int
    sequence_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    skipped_sequence_ids: tuple[int, ...] = ()
    failures: tuple[tuple[int, SequenceError], ...] = ()
    logprobs: tuple[tuple[int, Any], ...] = ()
    prompt_logprobs: tuple[tuple[int, Any], ...] = ()
    beam_candidates: Mapping[int, tuple[tuple[int, float], ...]] | None = None
    pooled: tuple[tuple[int, bytes], ...] = ()
    forward_seconds: float = 0.0
    cache_seconds: float = 0.0
    num_tokens: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    num_accepted_forced_tokens: int = 0
    predictions: tuple[tuple[int, int, int], ...] = ()

    @property
    def draft_counts(self) -> DraftCounts:
        predicted = sum([drafted for _, drafted, _ in self.predictions])
        right = sum([accepted for _, _, accepted in self.predictions])
        drafted, accepted, forced = self.num_draft_tokens, self.num_accepted_tokens, self.num_forced_tokens
        num_suffix = accepted - self.num_accepted_forced_tokens - right
        return DraftCounts(
            Sources(drafted - forced - predicted, forced, predicted),
            Sources(num_suffix, self.num_accepted_forced_tokens, right),
        )


@dataclass(slots=True)
class OwnerUpdate(TokenUpdate):
    """A step's results for one owner. `failed`: (request id, message) of requests that never fit."""

    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Blocks of both pools that a reset of the prefix cache forgot, and those kept because sequences hold them."""

    num_forgotten_device_blocks: int
    num_forgotten_host_blocks: int
    num_kept_device_blocks: int
    num_kept_host_blocks: int


class Sources(NamedTuple):
    """Numbers of drafts by their source: earlier ids of the sequence, a grammar, what the request predicts."""

    suffix: int = 0
    forced: int = 0
    prediction: int = 0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The tokens that were drafted, and those of them that were right."""

    drafted: Sources
    accepted: Sources

    def __add__(self, other: DraftCounts) -> DraftCounts:
        drafted, accepted = map(add, self.drafted, other.drafted), map(add, self.accepted, other.accepted)
        return DraftCounts(Sources(*drafted), Sources(*accepted))


NO_DRAFTS = DraftCounts(Sources(), Sources())


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts for operators. Totals count from the start of the process.

    `num_waiting_tokens`: known tokens of waiting sequences. `num_swaps_total`: preemptions by swapping.
    `num_queried_tokens_total`: prompt tokens that were looked up in the prefix cache. `num_given_back_blocks_total`:
    blocks that fell behind windows. `drafts_total`: the tokens that the worker drafted, by their source.
    """

    num_waiting: int
    num_running: int
    num_swapped: int
    num_device_blocks: int
    num_free_device_blocks: int
    num_cached_device_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_steps_in_flight: int
    num_preemptions_total: int
    num_swapped_out_blocks_total: int
    num_swapped_in_blocks_total: int
    num_copied_blocks_total: int
    num_prefill_pieces_total: int
    num_cached_tokens_total: int
    num_prompt_tokens_total: int
    num_completion_tokens_total: int
    num_waiting_tokens: int = 0
    num_cached_host_blocks: int = 0
    num_swaps_total: int = 0
    num_queried_tokens_total: int = 0
    num_given_back_blocks_total: int = 0
    drafts_total: DraftCounts = NO_DRAFTS

    @property
    def num_draft_tokens_total(self) -> int:
        return sum(self.drafts_total.drafted)

    @property
    def num_accepted_tokens_total(self) -> int:
        return sum(self.drafts_total.accepted)
