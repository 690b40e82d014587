"""The messages of the stream between a gateway and the scheduler (`scheduler.proto`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.models import Task
from blockyard.contract.pooling import Pooling, PoolingKind

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from blockyard.contract.sampling import (
        BeamSearch,
        Candidates,
        FinishReason,
        PredictionUsage,
        PromptPiece,
        SamplingParams,
    )
    from blockyard.contract.trace import TraceContext
    from blockyard.errors import BlockyardError

# These kinds read the prompt's first row or all rows, so none may come from the prefix cache.
_WHOLE_PROMPT_KINDS = (PoolingKind.FIRST, PoolingKind.MEAN, PoolingKind.TOKENS)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that requests may name as their model.

    Attributes:
        lora_id: at least 1 and never reused, unlike names, which may later mean another adapter.
        name: what requests give as their model.
        path: its folder on the workers' machines.
        digest: SHA-256 of its content, in hex; empty before a worker has read it.
        pinned: whether the adapter stays in the workers' caches.
        num_virtual_tokens: length of a soft prompt, which the scheduler puts before prompts; 0: not a soft prompt.
        rank, targets, num_bytes: as workers read them; 0 and empty if not known, as at gateways.
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
        """Returns the determinism id of the model with this adapter; empty if the model's own is empty."""
        return determinism_id and f"{determinism_id}+{self.digest[:16]}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the model that a gateway needs to validate requests.

    `model_digest` is the SHA-256 of its config.json, in hex. A request has at most `max_num_seqs` sequences or beams;
    0: not known. `max_prompt_len` limits prompts that must be computed in one step; 0: only `max_model_len` limits
    them.
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
    """Whether the scheduler can serve requests now; if not, `message` says what is missing.

    `needs_repair`: waiting does not help, somebody has to repair what the message names.
    """

    ready: bool
    message: str = ""
    needs_repair: bool = False


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request. Every number of `sampling` is set; its bad words are token ids.

    `request_id` contains the tenant. `gateway_state` lets another gateway take the request over.
    Submissions with the same `digest` are the same request. Only submissions with the same `cache_salt` share blocks
    of the prefix cache.
    """

    request_id: str
    prompt_token_ids: array[int]
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
    cache_salt: bytes = b""

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
    """The full state of one sequence.

    `reason` is None while the sequence runs. `logprobs` has an entry for each token if they were asked for.
    `pooled_values`: little-endian float32 numbers of a pooling sequence that has ended. `prediction`: None if nothing
    was drafted that the request's prediction says.
    """

    token_ids: Sequence[int]
    reason: FinishReason | None = None
    logprobs: Sequence[Candidates] = ()
    score: float | None = None
    error: SequenceError | None = None
    pooled_values: bytes = b""
    prediction: PredictionUsage | None = None


@dataclass(frozen=True, slots=True)
class Resubmission:
    """The record of a request that an earlier scheduler had accepted, for a new one to continue.

    If all sequences have ended, the request is only kept for clients to read.
    """

    age_seconds: float
    sequences: Sequence[SequenceRecord]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Add:
    """Submits a request. `handle`: the gateway's number for it, which the scheduler repeats in its answers.

    `age_seconds`: how long a request has waited for a scheduler to accept it.
    """

    handle: int
    submission: Submission
    resubmission: Resubmission | None = None
    age_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """Asks the scheduler for a request that is live or retained."""

    handle: int
    request_id: str


class AbortReason(StrEnum):
    CLIENT = "client"
    """The client cancelled the request or disconnected."""
    STOP_STRING = "stop_string"
    """A stop string ends the sequence."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request, or one of its sequences; then only the sequence's first `num_tokens` tokens count.

    With a handle it ends only the request that was sent with this handle.
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
    """A request that goes on after its worker was lost. `exact`: its tokens are the same as without the loss."""

    request_id: str
    cause: str
    num_replayed_tokens: int
    exact: bool


class Ending(NamedTuple):
    """A sequence that ended. `score`: a beam's score. `error`: why it failed; None if it did not."""

    sequence_id: int
    reason: FinishReason
    score: float | None = None
    error: SequenceError | None = None


class Prefill(NamedTuple):
    """A request whose prompt was computed. `sequence_id`: its first sequence. Cached tokens: from the prefix cache."""

    sequence_id: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """A resumed request with all its generated tokens. `submission`: the serialized request that a gateway sent."""

    handle: int
    submission: bytes
    first_sequence_id: int
    sequences: Sequence[SequenceRecord]
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[PromptPiece] = ()


# Not frozen: each step creates one per gateway, and steps are merged by extending its columns. The factory `list` takes
# an eighth of the time of `list[int]`.
@dataclass(slots=True)
class TokenUpdate:
    """The results of one or more steps for one gateway. `sequence_ids` and `token_ids` have the same length.

    `ended` and `prefilled` happened after these tokens. `logprobs`: (sequence id, candidates) for the tokens that have
    log probabilities, in order. `prompt_logprobs`: (first sequence id, piece of the prompt). `pooled`: (sequence id,
    little-endian float32 numbers) of sequences that ended. `predictions`: (sequence id, counts so far) of sequences of
    which something was drafted that their prediction says.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: list[Ending] = field(default_factory=list)
    prefilled: list[Prefill] = field(default_factory=list)
    logprobs: list[tuple[int, Candidates]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, PromptPiece]] = field(default_factory=list)
    pooled: list[tuple[int, bytes]] = field(default_factory=list)
    predictions: list[tuple[int, PredictionUsage]] = field(default_factory=list)


@dataclass(slots=True)
class Progress:
    """One message from the scheduler to a gateway.

    `recovered` and `resumed` requests and changes of `weights` (request id, version) apply before the tokens of
    `update`; failures apply after them.
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
