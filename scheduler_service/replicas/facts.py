"""What is known of a worker and its model, as values. Knows no messages and no connections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from blockyard.pooling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.replicas.loras.adapter import Adapter


class WorkerState(Enum):
    """What a worker process is doing; the values are the names in the contract, less their prefix.

    UNSPECIFIED: it does not say, or what has no name here.
    """

    UNSPECIFIED = "UNSPECIFIED"
    CREATED = "CREATED"
    DEVICE_READY = "DEVICE_READY"
    LOADED = "LOADED"
    CACHE_READY = "CACHE_READY"
    RUNNING = "RUNNING"
    UNREACHABLE = "UNREACHABLE"
    SLEEPING = "SLEEPING"
    STALE = "STALE"


class MemoryTag(Enum):
    """Memory of a worker that can be given up; the values are the names in the contract, less their prefix."""

    WEIGHTS = "WEIGHTS"
    KV_CACHE = "KV_CACHE"


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where weights are read from, and their name: what the workers were set up with, unless it says more."""

    model: str = ""
    revision: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class SleepInfo:
    """What of a worker's memory is given up; `is_stale`: its weights are no model's as a whole."""

    asleep: frozenset[MemoryTag] = frozenset()
    is_stale: bool = False


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The group of ranks that a worker is in, or was in last; `is_reusable`: it is whole and idle."""

    epoch: int
    is_reusable: bool
    problem: str
    members_digest: bytes


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the ranks of a group that is being formed meet, and what they show there."""

    address: str
    secret: bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker belongs, as whoever started it says; an empty `group` says nothing."""

    group: str
    index: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as its worker loaded it. `max_model_len` is that of the model's configuration.

    `whole_prompts`: it computes a prompt in one step, and nothing of it is kept.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    model_digest: str
    parameter_bytes: int
    weights_digest: str = ""
    weights_version: str = ""
    task: Task = Task.UNSPECIFIED
    whole_prompts: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is."""

    done_bytes: int
    total_bytes: int


class StartPhase(Enum):
    """What a worker does to be set up."""

    INIT_DEVICE = "INIT_DEVICE"
    LOAD_MODEL = "LOAD_MODEL"
    COUNT_BLOCKS = "COUNT_BLOCKS"
    INITIALIZE_CACHE = "INITIALIZE_CACHE"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far the start of a worker is; bytes are those of LOAD_MODEL."""

    phase: StartPhase
    load: LoadProgress = LoadProgress(0, 0)


@dataclass(frozen=True, slots=True)
class AvailableBlocks:
    """What fits into a worker's memory. `kv_windows`: of each KV group the keys that a query sees; 0: all."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    cache_block_bytes: int
    kv_windows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The pools that a worker is asked for. Block 0 (scratch) counts among the device blocks."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The pools that a worker has, and how far its results can be repeated. `kv_windows`: as of AvailableBlocks."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    cache_block_bytes: int
    max_model_len: int
    determinism_id: str
    batch_invariant: bool
    kv_windows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is and how far it is set up; `model`, `cache` and `group` are None before they exist."""

    worker_id: str
    incarnation: str
    api_version: str
    state: WorkerState
    epoch: int
    configuration_digest: str
    device: str
    model: LoadedModel | None
    cache: CacheInfo | None
    draining: bool = False
    group: GroupInfo | None = None
    placement: Placement = Placement("", 0)
    sleep: SleepInfo = SleepInfo()
    loras: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What gateways must know of the model to validate requests; a `max_num_seqs` of 0 is not known.

    `max_prompt_len`: of prompts that are computed in one step; 0: they are not.
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


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now; if not, `message` tells a person what is missing."""

    ready: bool
    message: str = ""


def repeats(before: ModelFacts, after: ModelFacts) -> bool:
    """Whether what one replica began another goes on with exactly."""
    return before.determinism_id == after.determinism_id and before.batch_invariant and after.batch_invariant


def is_same_model(one: ModelFacts, other: ModelFacts) -> bool:
    """Whether two replicas have one model, whatever their memory and their results' last bits."""
    return (one.model_digest, one.vocab_size, one.task) == (other.model_digest, other.vocab_size, other.task)


def combine(replicas: Sequence[ModelFacts]) -> ModelFacts:
    """What holds for each of several replicas, at least one."""
    first = replicas[0]
    return replace(
        first,
        max_model_len=min(facts.max_model_len for facts in replicas),
        max_prompt_len=min(facts.max_prompt_len for facts in replicas),
        batch_invariant=all(facts == first or repeats(first, facts) for facts in replicas) and first.batch_invariant,
    )
