"""What a gateway and the scheduler say to each other over their stream (`scheduler.proto`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.models import Task
from blockyard.contract.pooling import Pooling, PoolingKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.sampling import BeamSearch, Candidates, FinishReason, PromptPiece, SamplingParams
    from blockyard.contract.trace import TraceContext
    from blockyard.errors import BlockyardError

# The first row, or all rows, of the prompt are read: none may come from the prefix cache.
_WHOLE_PROMPT_KINDS = (PoolingKind.FIRST, PoolingKind.MEAN, PoolingKind.TOKENS)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that requests may name as their model.

    Attributes:
        lora_id: from 1 on, and never used again: under one name there may be another adapter later.
        name: the model's name in requests.
        path: its folder on the workers' machines.
        digest: SHA-256 of its content, in hex; empty before a worker has read it.
        pinned: it stays in the workers' caches.
        num_virtual_tokens: of a soft prompt, which the scheduler puts before prompts; 0: it is none.
        rank, targets, num_bytes: as workers found them; 0 and empty where that is not known, as at gateways.
    """

    lora_id: int
    name: str
    path: str
    digest: str = ""
    pinned: bool = False
    num_virtual_tokens: int = 0
    rank: int = 0
    targets: tuple[str, ...] = ()
    num_bytes: int = 0

    def identify(self, determinism_id: str) -> str:
        """Returns the determinism id of the model with this adapter, from the model's; empty if that is empty."""
        return determinism_id and f"{determinism_id}+{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a gateway must know of the model to validate requests.

    `model_digest` is the SHA-256 of its config.json, in hex. A request has at most `max_num_seqs` sequences or beams;
    0: not known. `max_prompt_len` limits prompts that are computed in one step; 0: `max_model_len` alone does.
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
        """Returns the facts for prompts with an adapter: its virtual tokens leave less room."""
        return replace(self, max_model_len=self.max_model_len - adapter.num_virtual_tokens) if adapter else self


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the scheduler can serve requests now; if not, `message` says what is missing."""

    ready: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request. Every number of `sampling` is set; its bad words are token ids.

    `request_id` has the tenant in it. `gateway_state` is what another gateway needs to go on with the request.
    Submissions with one `digest` ask for the same.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    n: int
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    max_queue_seconds: float | None = None
    remaining_seconds: float | None = None
    beam_search: BeamSearch | None = None
    gateway_state: bytes = b""
    digest: bytes = b""
    trace_context: TraceContext | None = None
    lora: Adapter | None = None
    fails_on_update: bool = False
    pooling: Pooling | None = None

    @property
    def num_virtual_tokens(self) -> int:
        """Tokens that the scheduler puts before the prompt."""
        return self.lora.num_virtual_tokens if self.lora else 0

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether no row of the prompt may come from the prefix cache."""
        if self.pooling is not None and self.pooling.kind in _WHOLE_PROMPT_KINDS:
            return True
        return self.sampling.prompt_logprobs is not None


class SequenceError(NamedTuple):
    """Why a sequence failed: the name of a `blockyard.errors.Reason`, and a message."""

    reason: str
    message: str


class SequenceRecord(NamedTuple):
    """All that is known of one sequence.

    `reason` is None while it runs. `logprobs` has an entry for each token, if they were asked for. `pooled_values`:
    float32, little endian, of a sequence with pooling that has ended.
    """

    token_ids: Sequence[int]
    reason: FinishReason | None = None
    logprobs: Sequence[Candidates] = ()
    score: float | None = None
    error: SequenceError | None = None
    pooled_values: bytes = b""


@dataclass(frozen=True, slots=True)
class Resubmission:
    """The record of a request that a scheduler had accepted before, and that goes on there.

    A request whose sequences have all ended is only kept for others to read.
    """

    age_seconds: float
    sequences: Sequence[SequenceRecord]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Add:
    """Sends a request under a handle of this gateway, which the scheduler repeats in its answers.

    `age_seconds`: how long a request that no scheduler has accepted has waited for one.
    """

    handle: int
    submission: Submission
    resubmission: Resubmission | None = None
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Asks for a request that is live or retained at the scheduler."""

    handle: int
    request_id: str


class AbortReason(StrEnum):
    CLIENT = "client"
    """The client cancelled the request, or is gone."""
    STOP_STRING = "stop_string"
    """A stop string ends the sequence."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request, or one of its sequences, of which the first `num_tokens` count.

    With a handle: only the request that was sent under it.
    """

    handle: int
    request_id: str
    reason: AbortReason = AbortReason.CLIENT
    sequence_index: int | None = None
    num_tokens: int = 0


class Acceptance(NamedTuple):
    """A queued request. Its sequence with index i has the id `first_sequence_id` + i."""

    handle: int
    first_sequence_id: int
    request_id: str = ""


class Failure(NamedTuple):
    """A request that the scheduler refused, or ended with an error."""

    handle: int
    error: BlockyardError
    request_id: str = ""


class Recovery(NamedTuple):
    """A request that goes on after its worker was lost. `exact`: with the tokens that it would have had."""

    request_id: str
    cause: str
    num_replayed_tokens: int
    exact: bool


class Ending(NamedTuple):
    """A sequence that ended. `score`: of a beam. `error`: of a sequence that failed."""

    sequence_id: int
    reason: FinishReason
    score: float | None = None
    error: SequenceError | None = None


class Prefill(NamedTuple):
    """A request whose prompt is computed, by its first sequence; the cached tokens came from the prefix cache."""

    sequence_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request with all that it has generated. `submission`: the bytes that its gateway sent."""

    handle: int
    submission: bytes
    first_sequence_id: int
    sequences: Sequence[SequenceRecord]
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptPiece] = ()


# Not frozen: a step makes one for each gateway, and steps merge by extending its columns. `list` as a factory takes an
# eighth of the time of `list[int]`.
@dataclass(slots=True)
class TokenUpdate:
    """What a step, or several, generated for one gateway. The first two columns have one length.

    `ended` and `prefilled` come behind these tokens. `logprobs`: (sequence id, candidates) of the tokens that have
    some, in their order. `prompt_logprobs`: (first sequence id, piece of the prompt). `pooled`: (sequence id, numbers)
    of sequences that ended: float32, little endian.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: list[Ending] = field(default_factory=list)
    prefilled: list[Prefill] = field(default_factory=list)
    logprobs: list[tuple[int, Candidates]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptPiece]] = field(default_factory=list)
    pooled: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """One message from the scheduler to a gateway.

    Requests that are `recovered` or `resumed`, and changes of `weights` (request id, version), come before the tokens
    of the update; failures come behind them.
    """

    facts: ModelFacts | None = None
    readiness: Readiness | None = None
    loras: Sequence[Adapter] | None = None
    accepted: list[Acceptance] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    resumed: list[Resumed] = field(default_factory=list)
    recovered: list[Recovery] = field(default_factory=list)
    weights: list[tuple[str, str]] = field(default_factory=list)
    update: TokenUpdate = field(default_factory=TokenUpdate)
