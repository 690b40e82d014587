"""The two block pools: allocates them, moves blocks within and between them, hashes them for tests.

Owns the bytes of KV. Knows no sequences: the scheduler decides which sequence a block belongs to.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockyard_kernels.cuda.swap import StepRows, Streams, SwapStreams, make_streams
from blockyard_kernels.ops import Backend, kv_pool_shape
from blockyard_kernels.select import make_arena
from blockyard_kernels.shapes import scale_width
from worker_service.device.registered import allocate_registered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard_kernels.arena import Arena
    from worker_service.models.decoder import DecoderModel
    from worker_service.step import Array, Step


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The format of a model's blocks: the shape of a pool without the number of blocks."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(model: DecoderModel, block_size: int) -> BlockFormat:
        """Returns the format of a model's blocks on this rank."""
        config, share = model.config, model.share
        num_layers = model.kv_groups.count_layers(share.layers)
        return BlockFormat(num_layers, len(share.kv_heads), block_size, config.head_dim, config.kv_dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block for all layers of a KV group."""
        return math.prod(self.pool_shape(1)) * self.dtype.itemsize

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        heads = self.num_kv_heads, self.block_size, self.head_dim + scale_width(self.dtype)
        return kv_pool_shape(num_blocks, self.num_layers, *heads)


def allocate_pool(
    block_format: BlockFormat, num_blocks: int, device: torch.device, arena: Arena | None = None
) -> Tensor:
    """Allocates a pool in the given arena, or in a new one.

    In host memory the system allocates a page at its first write.
    """
    memory = (arena or make_arena(device)).take(num_blocks * block_format.block_bytes)
    return memory.view(block_format.dtype).view(block_format.pool_shape(num_blocks))


def allocate_host_pool(block_format: BlockFormat, num_blocks: int, device: torch.device, arena: Arena) -> Tensor:
    """Allocates the host's pool of a device. For a GPU it lies in registered memory, not in an arena."""
    if device.type != "cuda" or num_blocks == 0:
        return allocate_pool(block_format, num_blocks, torch.device("cpu"), arena)
    memory = allocate_registered(num_blocks * block_format.block_bytes, device)
    return memory.view(block_format.dtype).view(block_format.pool_shape(num_blocks))


class CacheEngine:
    """The device pool and the host pool of one worker. Used by the device thread alone."""

    def __init__(
        self,
        block_format: BlockFormat,
        num_device_blocks: int,
        num_host_blocks: int,
        backend: Backend,
        *,
        can_sleep: bool = False,
    ) -> None:
        """`can_sleep`: whether the pools' memory on a GPU can be released and mapped again."""
        self.block_format = block_format
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self._backend = backend
        # The arena of the pools.
        self.arena = make_arena(backend.device, can_be_given_up=can_sleep)
        self.device_pool = allocate_pool(block_format, num_device_blocks, backend.device, self.arena)
        self.host_pool = allocate_host_pool(block_format, num_host_blocks, backend.device, self.arena)
        self._swaps: SwapStreams | None = None
        if backend.device.type == "cuda" and num_host_blocks:
            self.swap_on(make_streams(self.device_pool))

    def swap_on(self, streams: Streams) -> None:
        """Lets swaps run on their own CUDA streams from now on."""
        self._swaps = SwapStreams(self.device_pool, self.host_pool, streams)

    def transfer(self, step: Step, rows: StepRows) -> None:
        """Runs a step's transfers in order, so that later transfers may overwrite blocks that were swapped out.

        On a GPU they are enqueued, and the caller must enqueue the step's compute of `rows` next.
        """
        swap_out, swap_in, copy = step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy
        if self._swaps is not None:
            self._swaps.transfer(swap_out.pairs(), swap_in.pairs(), copy.pairs(), rows)
            return
        if len(swap_out):
            self._backend.swap_blocks(self.device_pool, self.host_pool, swap_out.pairs())
        if len(swap_in):
            self._backend.swap_blocks(self.host_pool, self.device_pool, swap_in.pairs())
        if len(copy):
            self._backend.copy_blocks(self.device_pool, copy.pairs())

    def clear_slots(self, block_ids: Array, slots: Array) -> None:
        """Writes zeros to slots of device blocks, for all layers. Both columns have the same length."""
        self._backend.clear_slots(self.device_pool, block_ids, slots)

    def device_checksums(self, block_ids: Sequence[int]) -> list[bytes]:
        """Hashes device blocks: SHA-256 of each layer's bytes, block by block."""
        self._synchronize()
        return _checksums(self.device_pool, block_ids)

    def host_checksums(self, block_ids: Sequence[int]) -> list[bytes]:
        self._synchronize()
        return _checksums(self.host_pool, block_ids)

    def _synchronize(self) -> None:
        if self._swaps is not None:
            self._swaps.synchronize()


def _checksums(pool: Tensor, block_ids: Sequence[int]) -> list[bytes]:
    layers = (layer for block_id in block_ids for layer in pool[block_id].cpu())
    return [hashlib.sha256(layer.contiguous().view(torch.uint8).numpy().tobytes()).digest() for layer in layers]
