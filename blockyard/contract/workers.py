"""The values that a scheduler and its workers exchange: device, model, memory, pools, group and adapters.

worker.proto documents the fields. An enum number of a later version is decoded as UNSPECIFIED if the enum has that.
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
    """The device to compute on; the values are those of `--device`."""

    UNSPECIFIED = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """The dtype that a model computes in; the values are those of `--dtype` and torch's names.

    INT8 is a dtype of KV blocks only, with those of `--kv-cache-dtype`.
    """

    UNSPECIFIED = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    INT8 = "int8"


class Quantization(StrEnum):
    """The quantization of weights; the values are those of `--quantization`, and int4 for some checkpoints."""

    UNSPECIFIED = "none"
    INT8 = "int8"
    FP8 = "fp8"
    INT4_GROUP = "int4"


class LoadFormat(StrEnum):
    """The source of weights; the values are those of `--load-format`."""

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
    """The state of a worker process. UNREACHABLE is set by others if the worker does not answer."""

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
    """Memory of a worker that can be freed."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The device to compute on, and this worker's rank in its replica. `configuration_digest`: see worker.proto."""

    device_type: DeviceType = DeviceType.UNSPECIFIED
    dtype: Dtype = Dtype.UNSPECIFIED
    configuration_digest: str = ""
    parallel: Parallel = ALONE


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Limits: slots on the device (0: no adapters), an adapter's LoRA rank, and adapters in the host's cache.

    `max_prompt_adapter_tokens`: the longest soft prompt; 0: no soft prompts. `max_lora_rank` 0: soft prompts only.
    """

    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    max_prompt_adapter_tokens: int = 0


NO_LORAS = LoraLimits()


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """The model to load, its task, and the formats of its weights and KV blocks. Empty `model`: the demo model."""

    model: str = ""
    revision: str = ""
    quantization: Quantization = Quantization.UNSPECIFIED
    format: LoadFormat = LoadFormat.AUTO
    lora: LoraLimits = NO_LORAS
    task: Task = Task.UNSPECIFIED
    kv_cache_dtype: Dtype = Dtype.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class LoadProgress:
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model as its worker reports it. `max_model_len`: from the model's configuration.

    `whole_prompts`: each prompt is computed in one step, and none of its KV is kept.
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
    """The source and the name of weights. Empty fields: those that the worker was set up with."""

    model: str = ""
    revision: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """The step limits and the memory to count blocks for. `block_size` 0: the device's default."""

    block_size: int
    device_memory_utilization: float
    swap_space_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_draft_rows: int = 0


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """The use of a device's memory in bytes: `budget_bytes` may be used in total, `cache_bytes` by KV blocks."""

    total_bytes: int = 0
    budget_bytes: int = 0
    weights_bytes: int = 0
    activation_bytes: int = 0
    other_bytes: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AvailableBlocks:
    """The blocks that fit into a worker's memory. `kv_windows`: the keys that a query sees, per KV group; 0: all."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    cache_block_bytes: int
    kv_windows: tuple[int, ...] = (0,)
    memory: MemoryBreakdown = field(default_factory=MemoryBreakdown)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The block pools to allocate, and the limits of a step.

    Block 0 (scratch) counts among the device blocks. `max_draft_tokens` of a sequence and `max_draft_rows` of a step
    limit the tokens that a worker drafts; 0: none.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_draft_tokens: int = 0
    max_draft_rows: int = 0


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The allocated block pools, and the determinism of results. `kv_windows`: as in AvailableBlocks.

    `decode_seconds`: for each number of rows in `decode_rows`, how long a step of decodes took at warm-up.
    """

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    cache_block_bytes: int
    max_model_len: int
    determinism_id: str
    batch_invariant: bool
    kv_windows: tuple[int, ...] = (0,)
    decode_rows: tuple[int, ...] = ()
    decode_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SleepInfo:
    """The memory that a sleeping worker has freed, and its sleep level, 1 or 2 (0: awake).

    `weights_are_stale`: the weights are incomplete or mixed, and must be loaded again.
    """

    level: int = 0
    asleep: frozenset[MemoryTag] = frozenset()
    weights_are_stale: bool = False


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Device bytes that a worker freed, and those that its process still uses."""

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
    """A worker group to join. `members`: the workers' incarnations, ordered by rank.

    `reuse`: keep the present group's connections; then the address and the secret are not used.
    """

    epoch: int
    rendezvous_address: str
    secret: bytes
    members: tuple[str, ...]
    timeout_seconds: float
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """The group that a worker is in or was in last. `reusable`: all its members are connected and idle."""

    epoch: int
    reusable: bool
    problem: str
    members_digest: bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """The replica group and index that a worker was started with; empty `group`: not set. `node`: its machine."""

    group: str = ""
    index: int = 0
    node: str = ""


@dataclass(frozen=True, slots=True)
class LoraInfo:
    """A worker's adapter limits, and the adapters in its cache, ordered by `lora_id`."""

    limits: LoraLimits = NO_LORAS
    adapters: tuple[Adapter, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's identity and state. `model`, `cache`, `group` and `lora` are None before they exist."""

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
