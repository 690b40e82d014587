"""The core's inputs and outputs: frozen values. Knows nothing of messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.contract.scheduling import TokenUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    `owner` is who gets its tokens (a gateway); `payload` travels unread to the worker (sampling parameters).
    `computes_prompt`: all of the prompt is computed, whatever is cached of it, since its log probabilities are wanted.
    `priority`: less is sooner. `beams`: its sequences are not sampled, but the `n` best of a beam search.
    `trace_context` travels unread too, for those who trace it. `lora`: the adapter that all its sequences have.
    `pooling`: what numbers to make of its prompt instead of tokens, unread; None: it generates.
    """

    request_id: str
    owner: str
    prompt_token_ids: tuple[int, ...]
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

    @property
    def lora_id(self) -> int:
        """Its adapter's number; 0: it has none."""
        return self.lora.lora_id if self.lora else 0

    @property
    def num_beam_candidates(self) -> int:
        """Tokens that each beam proposes, as `transformers` counts: so that as many as there are beams end nothing."""
        return max(2, 1 + len(self.stop_token_ids)) * self.beams.width if self.beams else 0

    @property
    def num_rows(self) -> int:
        """Rows of a step that it may come to need at once."""
        return self.beams.width if self.beams else self.n

    @property
    def num_sequence_ids(self) -> int:
        """Ids that it needs: its sequences, and for beams as many again as there can be beside those just dropped."""
        return self.n + 2 * self.beams.width if self.beams else self.n


class BlockPair(NamedTuple):
    """A block to read and a block to write."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class NewSequence:
    """Everything that a worker must know of a sequence that it does not have. `token_ids`: prompt, then output.

    `num_beam_candidates`: if not 0, it is not sampled: so many of its likeliest tokens are answered instead.
    """

    sequence_id: int
    sequence_index: int
    token_ids: tuple[int, ...]
    prompt_length: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    spec: GroupSpec
    num_beam_candidates: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """A child that copies its parent's row on the worker."""

    parent_id: int
    child_id: int
    sequence_index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what `ExecuteModelRequest` says, without its epoch. Columns of one group have one length.

    `input_ids`: (sequence id, token id), for those that decode a token which the worker did not choose.
    `activated_loras`: (slot, adapter), for those that come into a slot before anything is computed.
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """The worker's answer: sampled ids in columns, rows that were no-ops, rows that failed alone (id, why).

    `logprobs`: those of a sequence's token; `prompt_logprobs`: those of a piece of a sequence's prompt. The
    core passes both on, unread. `beam_candidates`: the likeliest (token id, log probability) of each beam, best first.
    `pooled`: (sequence id, its numbers), in the order of the step; the numbers are float32, little endian, unread.
    `forward_seconds` (with sampling) and `cache_seconds` (swaps and copies): how long the worker was busy with it; 0:
    it does not say.
    """

    step_id: int
    sequence_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    skipped_sequence_ids: tuple[int, ...] = ()
    failures: tuple[tuple[int, SequenceError], ...] = ()
    logprobs: Mapping[int, Any] | None = None
    prompt_logprobs: tuple[tuple[int, Any], ...] = ()
    beam_candidates: Mapping[int, tuple[tuple[int, float], ...]] | None = None
    pooled: tuple[tuple[int, bytes], ...] = ()
    forward_seconds: float = 0.0
    cache_seconds: float = 0.0


@dataclass(slots=True)
class OwnerUpdate(TokenUpdate):
    """What a step generated for one owner. `failed`: (request id, message) of requests that never fit."""

    failed: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CacheReset:
    """What a reset of the prefix cache forgot, and what sequences hold and is still found: blocks of both pools."""

    num_forgotten_device_blocks: int
    num_forgotten_host_blocks: int
    num_kept_device_blocks: int
    num_kept_host_blocks: int


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts for operators. The totals grow from the start of the process.

    `num_waiting_tokens`: known of the sequences that wait. `num_swaps_total`: of the preemptions. Of prompts that were
    prefilled `num_queried_tokens_total` were looked up in the prefix cache. `num_given_back_blocks_total`: by sequences
    that went on.
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
