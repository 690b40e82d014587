"""LoRA adapters of reference linears: both factors are float32, padded to one width whose shapes the probe tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from blockyard_kernels.reference.linear import ReferenceLinear
from blockyard_kernels.shapes import LinearSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.lora import LoraRows, PackedLora
    from blockyard_kernels.ops import PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceLora:
    shrink: ReferenceLinear
    expand: ReferenceLinear

    @property
    def num_bytes(self) -> int:
        return self.shrink.num_bytes + self.expand.num_bytes


class LoraRoom:
    """The slots of one weight. `sample` is an adapter of zeros for the probe, with the shapes of all adapters."""

    def __init__(self, num_slots: int, sample: ReferenceLora) -> None:
        self.sample = sample
        self.held: list[ReferenceLora | None] = [None] * num_slots

    @property
    def width(self) -> int:
        """The padded width (rank) of all adapters."""
        return self.sample.expand.in_features

    def shrink(self, hidden: Tensor, lora: LoraRows) -> Tensor:
        """Multiplies rows by the `shrink` factors of their adapters -> [R, width] float32; zeros without an adapter."""
        result = torch.zeros(len(hidden), self.width, device=hidden.device)
        for slot, rows in lora.by_slot:
            adapter = self.held[slot]
            if adapter is not None:
                places = torch.from_numpy(rows).to(hidden.device)
                result[places] = adapter.shrink.unrounded(hidden[places].float())
        return result

    def add(self, sums: Tensor, inner: Tensor, lora: LoraRows, result: Tensor) -> None:
        """Writes the rows of `result` that have adapters: their sums plus the `expand` products, rounded.

        Args:
            sums: [R, rows of the weight], with the bias.
            inner: the results of `shrink`, summed over all ranks.
            lora: the adapters of the rows.
            result: [R, rows of the weight] in the model's dtype.
        """
        for slot, rows in lora.by_slot:
            adapter = self.held[slot]
            if adapter is not None:
                places = torch.from_numpy(rows).to(sums.device)
                rounded = inner[places].to(result.dtype).float()
                result[places] = (sums[places].float() + adapter.expand.unrounded(rounded)).to(result.dtype)


class ReferenceLoraOps:
    """See `blockyard_kernels.lora.LoraOps`."""

    def __init__(self) -> None:
        self._rooms = WeakKeyDictionary[ReferenceLinear, LoraRoom]()

    def find(self, weight: ReferenceLinear) -> LoraRoom | None:
        return self._rooms.get(weight)

    def samples(self, linears: Iterable[ReferenceLinear]) -> list[ReferenceLinear]:
        """Returns sample factors, which have the shapes of these weights' adapters."""
        rooms = [room for linear in linears if (room := self.find(linear)) is not None]
        return [factor for room in rooms for factor in (room.sample.shrink, room.sample.expand)]

    def make_room(self, packed: PackedLinear, num_slots: int, max_width: int, arena: Arena | None = None) -> int:
        """Gives a weight slots, which take no memory of their own."""
        weight = cast("ReferenceLinear", packed)
        sample = _pack(weight, torch.zeros(max_width, weight.in_features), torch.zeros(weight.num_rows, max_width))
        self._rooms[weight] = LoraRoom(num_slots, sample)
        return sample.num_bytes

    def pack(self, packed: PackedLinear, shrink: Tensor, expand: Tensor) -> PackedLora:
        weight = cast("ReferenceLinear", packed)
        missing = self._rooms[weight].width - len(shrink)
        # The factors are rounded to the model's dtype.
        inner, outer = (factor.to(weight.dtype).float() for factor in (shrink, expand))
        return _pack(weight, functional.pad(inner, (0, 0, 0, missing)), functional.pad(outer, (0, missing)))

    def write(self, packed: PackedLinear, slot: int, lora: PackedLora | None) -> None:
        """Puts an adapter into a slot, packed again if the probe has chosen another method since."""
        room, adapter = self._rooms[cast("ReferenceLinear", packed)], cast("ReferenceLora | None", lora)
        if adapter is not None:
            for factor, like in ((adapter.shrink, room.sample.shrink), (adapter.expand, room.sample.expand)):
                if factor.method is not like.method:
                    factor.pack(like.method)
        room.held[slot] = adapter


def _pack(weight: ReferenceLinear, shrink: Tensor, expand: Tensor) -> ReferenceLora:
    inner = ReferenceLinear(shrink.to(weight.device), None, weight.method, LinearSpec(leaves=weight.leaves))
    return ReferenceLora(inner, ReferenceLinear(expand.to(weight.device), None, weight.method))
