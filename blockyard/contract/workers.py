"""What a scheduler and its workers tell each other of a worker: device, model, memory, pools, group and adapters.

worker.proto says what each field means. A number of a later version, where an enum has none for it, is UNSPECIFIED.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.contract.parallel import ALONE, Parallel

if TYPE_CHECKING:
    from blockyard.contract.scheduling import Adapter


class DeviceType(StrEnum):
    """Where to compute; the values are those of `--device`."""

    UNSPECIFIED = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """The type of the numbers that a model is computed in; the values are those of `--dtype`, and torch's names."""

    UNSPECIFIED = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(StrEnum):
    """How the weights of products are held; the values are those of `--quantization`, and int4 for some checkpoints."""

    UNSPECIFIED = "none"
    INT8 = "int8"
    FP8 = "fp8"
    INT4_GROUP = "int4"


class LoadFormat(StrEnum):
    """Where weights come from; the values are those of `--load-format`."""

    AUTO = "auto"
    RANDOM = "random"
    SHARDED = "sharded"
    PACKED = "packed"


class StateFormat(StrEnum):
    """How weights are saved; the values are those of LoadFormat."""

    SHARDED = "sharded"
    PACKED = "packed"


class CollectivesKind(StrEnum):
    """How the ranks of a group reach each other; the values are those of `--collectives`."""

    UNSPECIFIED = "unspecified"
    GLOO = "gloo"
    NCCL = "nccl"


class WorkerState(StrEnum):
    """What a worker process is doing. UNREACHABLE: it does not answer; no worker says that of itself."""

    UNSPECIFIED = "UNSPECIFIED"
    CREATED = "CREATED"
    DEVICE_READY = "DEVICE_READY"
    LOADED = "LOADED"
    CACHE_READY = "CACHE_READY"
    RUNNING = "RUNNING"
    UNREACHABLE = "UNREACHABLE"
    SLEEPING = "SLEEPING"
    STALE = "STALE"


class MemoryTag(StrEnum):
    """Memory of a worker that can be given up."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The device to compute on, and this worker's place in its replica. `configuration_digest`: see worker.proto."""

    device_type: DeviceType = DeviceType.UNSPECIFIED
    dtype: Dtype = Dtype.UNSPECIFIED
    configuration_digest: str = ""
    parallel: Parallel = ALONE


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Slots on the device, the largest rank of an adapter, and adapters in the host's cache; 0 slots: no adapters.

    `max_prompt_adapter_tokens`: the longest soft prompt; 0: there is none. Without LoRA the rank is 0.
    """

    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    max_prompt_adapter_tokens: int = 0


NO_LORAS = LoraLimits()


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The model to load, what it is served for, and how its weights are held. Empty `model`: the demo model."""

    model: str = ""
    revision: str = ""
    quantization: Quantization = Quantization.UNSPECIFIED
    format: LoadFormat = LoadFormat.AUTO
    lora: LoraLimits = NO_LORAS
    task: Task = Task.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class LoadProgress:
    done_bytes: int
    total_bytes: int


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
    dtype: Dtype = Dtype.UNSPECIFIED
    quantization: Quantization = Quantization.UNSPECIFIED
    stored_format: str = ""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """Where weights are read from, and their name: what the worker was set up with, unless it says more."""

    model: str = ""
    revision: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The steps and the memory to count blocks for. `block_size` 0: what suits the device."""

    block_size: int
    device_memory_utilization: float
    swap_space_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Where a device's memory goes, in bytes: `budget_bytes` may be used, `cache_bytes` are left for blocks."""

    total_bytes: int = 0
    budget_bytes: int = 0
    weights_bytes: int = 0
    activation_bytes: int = 0
    other_bytes: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AvailableBlocks:
    """The blocks that fit into a worker's memory. `kv_windows`: of each KV group the keys that a query sees; 0: all."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    cache_block_bytes: int
    kv_windows: tuple[int, ...] = (0,)
    memory: MemoryBreakdown = field(default_factory=MemoryBreakdown)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The pools that a worker is asked for, and the largest step that they are for.

    Block 0 (scratch) counts among the device blocks.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The pools that a worker has, and how far its results can be repeated. `kv_windows`: as in AvailableBlocks."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    cache_block_bytes: int
    max_model_len: int
    determinism_id: str
    batch_invariant: bool
    kv_windows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class SleepInfo:
    """What of a worker's memory is given up, by a level of 1 or 2 (0: nothing is).

    `weights_are_stale`: its weights are no model's as a whole.
    """

    level: int = 0
    asleep: frozenset[MemoryTag] = frozenset()
    weights_are_stale: bool = False


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the device that a worker gave up, and those that its process has there still."""

    freed_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The format and the folder to save weights in, and the most bytes of a file; 0: the worker's choice."""

    format: StateFormat
    folder: str
    max_file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SavedState:
    """The weights that a worker saved: the folder, the names of the files, and their bytes."""

    folder: str
    files: tuple[str, ...] = ()
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A group to join; `members` are the incarnations of the workers, by rank.

    `reuse`: the present group is taken over; then the address and the secret are not used.
    """

    epoch: int
    rendezvous_address: str
    secret: bytes
    members: tuple[str, ...]
    timeout_seconds: float
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The group of ranks that a worker is in, or was in last; `reusable`: it is whole and idle."""

    epoch: int
    reusable: bool
    problem: str
    members_digest: bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker belongs, as whoever started it says; an empty `group` says nothing. `node`: its machine."""

    group: str = ""
    index: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A worker's room for adapters, and those in its cache, by `lora_id`."""

    limits: LoraLimits = NO_LORAS
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is and how far it is set up; `model`, `cache`, `group` and `lora` are None before they exist."""

    worker_id: str
    incarnation: str
    api_version: str
    state: WorkerState
    epoch: int
    configuration_digest: str
    device: str
    model: LoadedModel | None = None
    cache: CacheInfo | None = None
    draining: bool = False
    group: GroupInfo | None = None
    placement: Placement = Placement()
    sleep: SleepInfo = SleepInfo()
    lora: LoraInfo | None = None
