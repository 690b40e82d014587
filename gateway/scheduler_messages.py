"""The messages between this gateway and its scheduler, as values. Knows neither their encoding nor the connection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from blockyard.pooling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.errors import BlockyardError
    from blockyard.logprob_columns import Candidates
    from blockyard.tracing.spans import TraceContext
    from gateway.request import BeamOptions, FinishReason, SamplingOptions


class Adapter(NamedTuple):
    """An adapter that requests may name as their model, as the scheduler said it.

    `lora_id` is never used again: under one name there may be another one later. `digest`: SHA-256 of its content, hex.
    `num_virtual_tokens`: of a soft prompt, which the scheduler puts before prompts.
    """

    lora_id: int
    name: str
    path: str
    digest: str
    pinned: bool = False
    num_virtual_tokens: int = 0

    def identify(self, determinism_id: str) -> str:
        """Returns the determinism id of the model with this adapter, from that of the model; empty if that is."""
        return determinism_id and f"{determinism_id}+{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the scheduler knows of the model.

    `model_digest` is the SHA-256 of its config.json, in hex. One request has at most `max_num_seqs` sequences or beams;
    0: the scheduler does not say. `max_prompt_len`: of prompts that are computed in one step; 0: they are not.
    """

    model_digest: str
    vocab_size: int
    max_model_len: int
    block_size: int
    determinism_id: str
    batch_invariant: bool
    max_num_seqs: int = 0
    weights_version: str = ""
    task: Task = Task.UNSPECIFIED
    max_prompt_len: int = 0
    warnings: tuple[str, ...] = ()

    def behind(self, adapter: Adapter | None) -> ModelFacts:
        """Returns what holds for prompts with an adapter: its virtual tokens leave less room."""
        return replace(self, max_model_len=self.max_model_len - adapter.num_virtual_tokens) if adapter else self


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the scheduler can serve now; if not, what is missing."""

    ready: bool
    message: str


class ReplicaReading(NamedTuple):
    """A replica's load: the share of its device blocks in use, and totals that begin anew when it is set up."""

    replica_id: int
    kv_usage: float
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class SchedulerReading(NamedTuple):
    """The scheduler's load at one time: requests that wait for a replica and those that one has taken."""

    num_waiting_requests: int
    num_running_requests: int
    replicas: tuple[ReplicaReading, ...]


class PoolingKind(IntEnum):
    """Which numbers are made of a prompt, with the contract's numbers."""

    LAST = 1
    FIRST = 2
    MEAN = 3
    TOKENS = 4
    CLASSIFY = 5
    LABEL_LOGITS = 6


@dataclass(frozen=True, slots=True)
class Pooling:
    """What to make of a prompt instead of tokens after it: see Pooling in the contract."""

    kind: PoolingKind
    label_token_ids: tuple[int, ...] = ()
    normalise: bool = False
    dimensions: int = 0
    leaves_raw: bool = False
    second_from: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request as the scheduler needs it. Every number of `sampling` is set; its bad words are token ids.

    `request_id` is the one on the wire, with the tenant in it. `gateway_state` is what another gateway needs to go on
    with it; of two submissions with one `body_digest` the same was asked. `trace_context`: the request's span, if it is
    traced; no part of what is asked.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    n: int
    sampling: SamplingOptions
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    max_queue_seconds: float | None = None
    remaining_seconds: float | None = None
    beam_search: BeamOptions | None = None
    gateway_state: bytes = b""
    body_digest: bytes = b""
    trace_context: TraceContext | None = None
    lora: Adapter | None = None
    fails_on_update: bool = False
    pooling: Pooling | None = None

    @property
    def num_virtual_tokens(self) -> int:
        """Tokens that the scheduler puts before the prompt."""
        return self.lora.num_virtual_tokens if self.lora else 0


class SequenceRecord(NamedTuple):
    """All that is known of one sequence; `reason` is None while it runs, `logprobs` an entry a token if asked for.

    `pooled_values`: float32, little endian, of one with pooling that has ended.
    """

    token_ids: Sequence[int]
    reason: FinishReason | None = None
    logprobs: Sequence[Candidates] = ()
    score: float | None = None
    error: BlockyardError | None = None
    pooled_values: bytes = b""


@dataclass(frozen=True, slots=True)
class Resubmission:
    """The record of a request that a scheduler had accepted before: it continues there. A whole one is only kept."""

    age_seconds: float
    sequences: Sequence[SequenceRecord]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Add:
    """Sends a request under a handle of this gateway, which the scheduler repeats in its answers."""

    handle: int
    submission: Submission
    resubmission: Resubmission | None = None
    # Of one that waited for a scheduler and that none had accepted.
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Looks up a request that is live or retained at the scheduler."""

    handle: int
    request_id: str


class AbortReason(IntEnum):
    """Why the gateway ends something, with the contract's numbers."""

    CLIENT = 1
    STOP_STRING = 2


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request that was sent under this handle, or one of its sequences of which the first `num_tokens` count."""

    handle: int
    request_id: str
    reason: AbortReason = AbortReason.CLIENT
    sequence_index: int | None = None
    num_tokens: int = 0


Outgoing = Add | Resume | Abort


class Cancelled(NamedTuple):
    """The result of a cancel, by names: requests that ran, and those that the scheduler may yet hear of."""

    cancelled: Sequence[str] = ()
    pending: Sequence[str] = ()


class Acceptance(NamedTuple):
    """A queued request; its sequences have the ids from `first_sequence_id` on."""

    handle: int
    first_sequence_id: int


class Failure(NamedTuple):
    """A request that the scheduler refused, or ended with an error."""

    handle: int
    error: BlockyardError


class Recovery(NamedTuple):
    """A request that goes on after its worker was lost."""

    request_id: str
    cause: str
    num_replayed_tokens: int
    exact: bool


class Ending(NamedTuple):
    """A sequence that ended with the tokens of the same message; `score`: that of a beam; `error`: why it failed."""

    sequence_id: int
    reason: FinishReason
    score: float | None = None
    error: BlockyardError | None = None


class PromptPiece(NamedTuple):
    """Log probabilities of the prompt's tokens from `first_position` on; `sequence_id` is one with this prompt."""

    sequence_id: int
    first_position: int
    candidates: Sequence[Candidates]


class Prefill(NamedTuple):
    """A request whose prompt is computed, by its first sequence; some of it was found in the prefix cache."""

    sequence_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request with all that it has given so far; `submission` is as it was sent, by this gateway or another."""

    handle: int
    submission: Submission
    first_sequence_id: int
    sequences: Sequence[SequenceRecord]
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptPiece] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """One message of the scheduler: what happened in a step, or in several. The token columns are of one length.

    What was `recovered` or `resumed` was so before the tokens came. `weights`: (request_id, version), from these tokens
    on. `logprobs`: of those tokens that have them, in their order, the sequence of each and its candidates. `pooled`:
    of the sequences that ended, those that have numbers: the sequence and these, float32, little endian.
    """

    accepted: list[Acceptance]
    failed: list[Failure]
    prefilled: list[Prefill]
    sequence_ids: list[int]
    token_ids: list[int]
    ended: list[Ending]
    facts: ModelFacts | None = None
    readiness: Readiness | None = None
    recovered: tuple[Recovery, ...] = ()
    weights: tuple[tuple[str, str], ...] = ()
    logprobs: Sequence[tuple[int, Candidates]] = ()
    prompt_logprobs: Sequence[PromptPiece] = ()
    resumed: Sequence[Resumed] = ()
    loras: tuple[Adapter, ...] | None = None
    pooled: Sequence[tuple[int, bytes]] = ()
