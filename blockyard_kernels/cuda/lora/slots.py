"""LoRA slots of weights on a GPU. Their device memory never moves, so that CUDA graphs may contain its addresses.

A packed adapter is one run of bytes in pinned host memory. Putting it into a slot is one asynchronous copy on the
device's stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from blockyard_kernels.arena import ALIGNMENT, Arena, Chunks, LastingArena
from blockyard_kernels.cuda.lora.products import WIDTH_MULTIPLE, Factors, expand, shrink
from blockyard_kernels.cuda.lora.segments import Segments

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.cuda.linear import CudaLinear
    from blockyard_kernels.lora import LoraRows, PackedLora
    from blockyard_kernels.ops import PackedLinear

CHUNK_BYTES = 8 << 20
# The header before an adapter's factors, whose first word is the adapter's width.
HEADER_BYTES = 64


@dataclass(frozen=True, slots=True, eq=False)
class CudaLora:
    """The factors of one adapter, as a slot holds them [bytes] uint8."""

    held: Tensor

    @property
    def num_bytes(self) -> int:
        return self.held.nbytes


class LoraRoom:
    def __init__(self, weight: CudaLinear, num_slots: int, max_width: int, arena: Arena) -> None:
        self._weight = weight
        width = _up_to_multiple(max_width, WIDTH_MULTIPLE)
        self.slot_bytes = _slot_bytes(weight, width)
        # The memory is zero, so all slots are empty.
        self._slots = arena.take(num_slots * self.slot_bytes).view(num_slots, self.slot_bytes)
        numbers = self._slots[:, HEADER_BYTES:].view(weight.dtype)
        self._factors = Factors(self._slots.view(torch.int32)[:, 0], numbers, width)

    def write(self, slot: int, lora: CudaLora | None) -> None:
        """Puts an adapter into a slot, or empties it, after all work launched before."""
        if lora is None:
            self._slots[slot, :HEADER_BYTES].zero_()
        else:
            self._slots[slot, : len(lora.held)].copy_(lora.held, non_blocking=True)

    def segments(self, lora: LoraRows) -> Segments:
        return Segments.of(lora, len(self._slots), self._slots.device)

    def shrink(self, hidden: Tensor, lora: LoraRows) -> Tensor:
        """Multiplies rows by the `shrink` factors of their adapters -> [R, max_width] float32."""
        return shrink(hidden, self._factors, self.segments(lora), self._weight.leaves)

    def expand(self, sums: Tensor, inner: Tensor, lora: LoraRows, result: Tensor) -> None:
        """Writes the rows of the result that have adapters; see `blockyard_kernels.cuda.lora.products.expand`."""
        weight = self._weight
        expand(
            sums, weight.bias, inner, self._factors, self.segments(lora), result, weight.in_features,
            weight.epilogue,
        )  # fmt: skip


class CudaLoraOps:
    """See `blockyard_kernels.lora.LoraOps`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rooms = WeakKeyDictionary["CudaLinear", LoraRoom]()
        on_gpu = device.type == "cuda"
        self._chunks = Chunks(lambda count: torch.empty(count, dtype=torch.uint8, pin_memory=on_gpu), CHUNK_BYTES)

    def find(self, weight: CudaLinear) -> LoraRoom | None:
        return self._rooms.get(weight)

    def make_room(self, packed: PackedLinear, num_slots: int, max_width: int, arena: Arena | None = None) -> int:
        """Gives a weight slots. Packed adapters are in host memory, and take no device memory outside the slots."""
        weight = cast("CudaLinear", packed)
        room = self._rooms[weight] = LoraRoom(weight, num_slots, max_width, arena or LastingArena(self._device))
        return 0 if self._device.type == "cuda" else room.slot_bytes

    def pack(self, packed: PackedLinear, shrink: Tensor, expand: Tensor) -> PackedLora:
        """Packs both factors, one after the other, into one run of bytes."""
        weight = cast("CudaLinear", packed)
        width = _up_to_multiple(len(shrink), WIDTH_MULTIPLE)
        missing = width - len(shrink)
        inner = functional.pad(shrink.to(weight.dtype), (0, 0, 0, missing))
        outer = functional.pad(expand.to(weight.dtype), (0, missing))
        held = self._chunks.take(HEADER_BYTES + (inner.numel() + outer.numel()) * weight.dtype.itemsize)
        held[:HEADER_BYTES].view(torch.int32).copy_(torch.tensor([width] + [0] * (HEADER_BYTES // 4 - 1)))
        numbers = held[HEADER_BYTES:].view(weight.dtype)
        numbers[: inner.numel()] = inner.ravel()
        numbers[inner.numel() :] = outer.ravel()
        return CudaLora(held)

    def write(self, packed: PackedLinear, slot: int, lora: PackedLora | None) -> None:
        self._rooms[cast("CudaLinear", packed)].write(slot, cast("CudaLora | None", lora))


def _slot_bytes(weight: CudaLinear, width: int) -> int:
    numbers = width * (weight.in_features + len(weight.weight))
    return _up_to_multiple(HEADER_BYTES + numbers * weight.dtype.itemsize, ALIGNMENT)


def _up_to_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
