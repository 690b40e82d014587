"""Results of the operations of the closed list. The fields are those of the contract's messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StrangeTensor:
    """A tensor with numbers that are not finite."""

    name: str
    num_nans: int
    num_infinities: int


@dataclass(frozen=True, slots=True)
class NumericsReport:
    """The weights and filled blocks with numbers that are not finite."""

    num_tensors: int
    num_blocks: int
    tensors: tuple[StrangeTensor, ...]
    device_block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The speed of one kind of transfer."""

    name: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class BandwidthReport:
    """The speed of memory."""

    ways: tuple[Bandwidth, ...]


@dataclass(frozen=True, slots=True)
class WeightNorm:
    """The norm of this rank's part of a tensor."""

    name: str
    shape: tuple[int, ...]
    norm: float
    largest: float


@dataclass(frozen=True, slots=True)
class WeightNormsReport:
    """Norms in the order of a step."""

    weights: tuple[WeightNorm, ...]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The contents of memory, in bytes."""

    device_total_bytes: int
    device_available_bytes: int
    process_bytes: int
    weights_bytes: int
    device_blocks_bytes: int
    host_blocks_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The worker's place in its replica, and its group."""

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    epoch: int
    problem: str
    first_layer: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """The freed memory."""

    num_objects: int
    freed_bytes: int
    freed_device_bytes: int


Report = NumericsReport | BandwidthReport | WeightNormsReport | MemoryReport | GroupReport | GarbageReport
