"""Plans a replica before anything starts: each rank's memory, the blocks that fit, and any refusal.

It runs the checks of a worker and its scheduler in the same order and by the same code, so the refusals are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.capacity.adapters import adapter_format, check_adapters, lora_bytes, lora_limits, wrong_limits
from blockyard.capacity.devices import check_gpu_dtype, choose_device_type
from blockyard.capacity.formats import check_kv_cache, check_ops, check_quantization, held_in, weight_format
from blockyard.capacity.limits import (
    DEFAULT_BLOCK_SIZE,
    DoesNotFit,
    KvBlocks,
    choose_max_model_len,
    max_useful_blocks,
    wrong_profile_request,
)
from blockyard.capacity.memory import CPU_RESERVE_BYTES, Usage, fixed_plan, plan_cache, set_aside
from blockyard.capacity.steps import cpu_scratch, step_bytes, torch_scratch
from blockyard.capacity.weights import ITEM_BYTES, check_room, weights_bytes
from blockyard.contract.parallel import Parallel, ParallelSizes
from blockyard.contract.workers import AvailableBlocks, ProfileRequest
from blockyard.errors import BlockyardError, Violation, invalid
from blockyard.model_config.kv_groups import KvGroups
from blockyard.model_config.parallel_sizes import check_sizes, wrong_parallel
from blockyard.model_config.share import Share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.configuration import SystemConfiguration
    from blockyard.model_config.decoder_config import DecoderConfig

# Memory of a worker's process beside weights, blocks and steps: Python, torch and their libraries. Measured on a CPU
# (x86-64, Linux, torch 2.11); on a GPU its libraries' handles are left to the reserve of the utilization.
PROCESS_BYTES = {"cpu": 310 << 20, "cuda": 256 << 20}
KEYS_AND_VALUES = 2
# The scale of a token's key or value in int8, for each head.
KV_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices that workers compute on: this machine's, or those of a named GPU. Bytes are per device."""

    name: str
    total_bytes: int
    available_bytes: int
    num_devices: int
    """The number of GPUs; 0: the workers compute on the CPU and share its memory."""
    capability: tuple[int, int] = (9, 0)
    num_threads: int = 0

    @property
    def has_gpu(self) -> bool:
        return self.num_devices > 0


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The plan of a replica. `ranks` holds the first rank of each stage; `refusal` says why it would not start."""

    sizes: ParallelSizes
    ranks: tuple[AvailableBlocks, ...]
    max_model_len: int
    max_num_seqs: int
    lora_bytes: int = 0
    """Device bytes of adapters at the worker with the most of them; part of its `other_bytes`."""
    refusal: str = ""

    @property
    def tightest(self) -> AvailableBlocks:
        """The rank with the fewest blocks. It bounds all ranks, since a step names the same blocks to each."""
        return min(self.ranks, key=lambda rank: rank.num_device_blocks)

    @property
    def num_tokens(self) -> int:
        """Tokens that the device blocks hold in sequences of maximum length; block 0 is scratch."""
        num_blocks, block_size = self.tightest.num_device_blocks - 1, self.tightest.block_size
        if not any(self.tightest.kv_windows) or not self.max_model_len:
            return num_blocks // len(self.tightest.kv_windows) * block_size
        return num_blocks * self.max_model_len // self._blocks.count_blocks(self.max_model_len)

    @property
    def _blocks(self) -> KvBlocks:
        return KvBlocks(self.tightest.block_size, self.tightest.kv_windows)

    def num_sequences(self, length: int) -> int:
        """Returns how many sequences of `length` tokens run at once."""
        return min((self.tightest.num_device_blocks - 1) // self._blocks.count_blocks(length), self.max_num_seqs)


def block_bytes(
    network: DecoderConfig, share: Share, block_size: int, groups: KvGroups, kv_cache_dtype: str = "auto"
) -> int:
    """Counts the bytes of a KV block at a rank, over its layers of one KV group."""
    num_layers = groups.count_layers(share.layers)
    head_bytes = network.head_dim * ITEM_BYTES[network.dtype_name]
    if kv_cache_dtype == "int8":
        head_bytes = network.head_dim + KV_SCALE_BYTES
    return num_layers * KEYS_AND_VALUES * len(share.kv_heads) * block_size * head_bytes


def plan_replica(
    network: DecoderConfig, configuration: SystemConfiguration, hardware: Hardware, sizes: ParallelSizes
) -> ReplicaPlan:
    """Plans a replica of the given parallel sizes; the plan's `refusal` says why it would not start."""
    step = configuration.scheduler
    planned = ReplicaPlan(sizes, (), 0, step.max_num_seqs)
    try:
        ranks = tuple(_plan_rank(network, configuration, hardware, rank) for rank in _differing_ranks(sizes))
        most = max(_lora_bytes(network, configuration, hardware, rank) for rank in _differing_ranks(sizes))
        planned = replace(planned, ranks=ranks, lora_bytes=most)
        least = planned.tightest
        num_blocks = configuration.cache.num_device_blocks or least.num_device_blocks
        max_draft_tokens = configuration.speculation.find_limits(sizes).max_draft_tokens
        kv_blocks = KvBlocks(least.block_size, least.kv_windows, step.max_num_batched_tokens, max_draft_tokens)
        length = choose_max_model_len(
            step.max_model_len, network.max_model_len, num_blocks, least.block_size, kv_blocks
        )
    except BlockyardError as error:
        return replace(planned, refusal=error.message)
    except DoesNotFit as error:
        return replace(planned, refusal=str(error))
    return replace(planned, max_model_len=length)


def _differing_ranks(sizes: ParallelSizes) -> list[Parallel]:
    """Lists the first rank of each stage: no other rank of the stage holds more."""
    tensor, pipeline = sizes.tensor_parallel_size, sizes.pipeline_parallel_size
    return [Parallel(tensor, pipeline, stage * tensor) for stage in range(pipeline)]


def check_network(
    network: DecoderConfig, configuration: SystemConfiguration, hardware: Hardware, parallel: Parallel
) -> tuple[str, str]:
    """Runs a worker's checks except memory. Returns the device type and the kernels; raises BlockyardError."""
    device, worker = configuration.device, configuration.worker
    _refuse(wrong_parallel(parallel))
    kind = choose_device_type(device.device, "auto", has_gpu=hardware.has_gpu)
    if kind == "cuda":
        check_gpu_dtype(network.dtype_name, hardware.name, hardware.capability)
    if configuration.lora.max_loras:
        _refuse(wrong_limits(lora_limits(configuration.lora)))
        check_adapters(network, lora_limits(configuration.lora))
    check_sizes(network, parallel)
    kernels = worker.gpu_kernels if kind == "cuda" else worker.cpu_kernels
    check_quantization(device.quantization, network, kind, kernels)
    check_kv_cache(configuration.cache.kv_cache_dtype, network, kind, kernels)
    check_ops(network, kind, kernels)
    return kind, kernels


def _plan_rank(
    network: DecoderConfig, configuration: SystemConfiguration, hardware: Hardware, parallel: Parallel
) -> AvailableBlocks:
    device, worker = configuration.device, configuration.worker
    kind, kernels = check_network(network, configuration, hardware, parallel)
    share = Share.of(network, parallel)
    invariant = worker.batch_invariant
    held = weight_format(kind, network.dtype_name, device.quantization, kernels, batch_invariant=invariant)
    num_bytes = weights_bytes(network, share, held)
    check_room(num_bytes, hardware.available_bytes, held_in(network, device.quantization), kind)
    num_sharing = _count_sharing(configuration, hardware, parallel, kind)
    request = _profile_request(configuration, num_sharing)
    _refuse(wrong_profile_request(request))
    block_size = request.block_size or DEFAULT_BLOCK_SIZE[kind]
    groups = KvGroups.of(network, kind)
    num_bytes_of_block = block_bytes(network, share, block_size, groups, configuration.cache.kv_cache_dtype)
    pool = {"block_size": block_size, "block_bytes": num_bytes_of_block}
    if worker.device_cache_gib:
        cache_bytes = int(worker.device_cache_gib * 2**30)
        swap_space_bytes = request.swap_space_bytes
        fixed = fixed_plan(hardware.total_bytes, **pool, cache_bytes=cache_bytes, swap_space_bytes=swap_space_bytes)
        return replace(fixed, kv_windows=groups.windows)
    num_threads = worker.num_threads or hardware.num_threads
    scratch = cpu_scratch(num_threads) if kind == "cpu" and kernels != "reference" else torch_scratch()
    activation = step_bytes(network, share, held, request, scratch)
    other = PROCESS_BYTES[kind] + (CPU_RESERVE_BYTES if kind == "cpu" else 0)
    loras = _lora_bytes(network, configuration, hardware, parallel)
    # Workers that share a device all load their weights before any of them allocates blocks.
    available = max(0, hardware.available_bytes - num_sharing * (num_bytes + other))
    planned = plan_cache(
        set_aside(Usage(hardware.total_bytes, available, num_bytes, activation, other), loras),
        **pool,
        utilization=request.device_memory_utilization,
        swap_space_bytes=request.swap_space_bytes,
        host_shares_device=kind == "cpu",
        max_useful_blocks=max_useful_blocks(request.max_num_seqs, network.max_model_len, block_size, groups.num_groups),
    )
    return replace(planned, kv_windows=groups.windows)


def _lora_bytes(
    network: DecoderConfig, configuration: SystemConfiguration, hardware: Hardware, parallel: Parallel
) -> int:
    kind, worker = (
        choose_device_type(configuration.device.device, "auto", has_gpu=hardware.has_gpu),
        configuration.worker,
    )
    held = adapter_format(kind, network.dtype_name, worker.gpu_kernels if kind == "cuda" else worker.cpu_kernels)
    return lora_bytes(network, Share.of(network, parallel), held, lora_limits(configuration.lora))


def _profile_request(configuration: SystemConfiguration, num_sharing: int) -> ProfileRequest:
    """Builds the scheduler's profile request; each of the sharing workers gets an equal part of the device."""
    device, step = configuration.device, configuration.scheduler
    return ProfileRequest(
        block_size=configuration.cache.block_size,
        device_memory_utilization=device.device_memory_utilization / num_sharing,
        swap_space_bytes=int(device.swap_space_gib * 2**30),
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_num_seqs=step.max_num_seqs,
        max_draft_rows=configuration.speculation.find_limits(configuration.parallel).max_draft_rows,
    )


def _count_sharing(configuration: SystemConfiguration, hardware: Hardware, sizes: ParallelSizes, kind: str) -> int:
    """Counts the workers that share one device; on the CPU all workers share one memory."""
    num_workers = configuration.replicas.data_parallel_size * sizes.world_size
    return -(-num_workers // (hardware.num_devices if kind == "cuda" else 1))


def _refuse(violations: Iterable[Violation]) -> None:
    if found := list(violations):
        raise invalid(found)
