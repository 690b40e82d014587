"""The reference backend: the op set in torch, for any device that torch has. The oracle for every faster backend.

On a CPU its results are batch-invariant if `probe` returns true; on a GPU the same code runs without that guarantee.
It holds the choices of the probe and no tensors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from blockyard_kernels import blocks, planning
from blockyard_kernels.launching import IMMEDIATE, CudaLauncher, Launcher
from blockyard_kernels.packed import QuantizedWeight, WeightRows
from blockyard_kernels.reference import attention, elementwise, probe
from blockyard_kernels.reference.linear import Method, ReferenceLinear, can_prepack, join_rows
from blockyard_kernels.reference.lora import ReferenceLoraOps
from blockyard_kernels.reference.mixture import ReferenceMixtureOps
from blockyard_kernels.reference.quantized import ReferenceQuantized
from blockyard_kernels.reference.recurrent import ReferenceRecurrentOps
from blockyard_kernels.reference.sampling import ReferenceSampling
from blockyard_kernels.shapes import PLAIN_LINEAR, AttentionShape, LinearSpec
from blockyard_kernels.suffixes import HostDrafting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.capture import CapturedStep, CaptureSizes
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.drafting import DraftingOps
    from blockyard_kernels.lora import LoraOps, LoraRows, VirtualRows
    from blockyard_kernels.mixture.ops import MixtureOps
    from blockyard_kernels.ops import AttentionBatch, PackedLinear
    from blockyard_kernels.recurrent.ops import RecurrentOps


class ReferenceBackend(planning.AttentionPlanning):
    """See `blockyard_kernels.ops.Backend`."""

    name = "reference"
    is_complete = True
    packs_into_arenas = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launcher: Launcher = CudaLauncher(device) if device.type == "cuda" else IMMEDIATE
        self.sampling = ReferenceSampling(device)
        self.drafting: DraftingOps = HostDrafting()
        self.lora: LoraOps | None
        self._loras = self.lora = ReferenceLoraOps()
        # Results depend on torch's version.
        self.identity = torch.__version__
        # The multiples to which attention pads the rows of its tiles, as the probe has found them.
        self._row_multiples: dict[AttentionShape, int] = {}
        self._method = _first_method(device)
        self._joined: Ranks | None = None
        self.recurrent: RecurrentOps | None = ReferenceRecurrentOps()
        self.mixture: MixtureOps | None = ReferenceMixtureOps(self._method, lambda: self._ranks)

    def set_num_threads(self, num_threads: int) -> None:
        """Sets the calling thread's count of torch's threads."""
        torch.set_num_threads(num_threads)

    def pack_linear(
        self,
        weight: WeightRows,
        bias: Tensor | None = None,
        spec: LinearSpec = PLAIN_LINEAR,
        arena: Arena | None = None,
    ) -> PackedLinear:
        """Packs a weight and a bias, outside the arena: oneDNN allocates its own memory for packed weights."""
        if isinstance(weight, QuantizedWeight):
            return ReferenceQuantized(weight, bias, self._method, spec)
        return ReferenceLinear(join_rows(weight), bias, self._method, spec)

    def linear(
        self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False, lora: LoraRows | None = None
    ) -> Tensor:
        weight = cast("ReferenceLinear", packed)
        sums = weight.unrounded(hidden)
        if wide:
            return elementwise.transform_logits(sums.float(), weight.logits)
        room = self._loras.find(weight) if lora is not None else None
        inner = room.shrink(hidden, lora) if room is not None and lora is not None else None
        if weight.is_partial:
            both = sums.float() if inner is None else torch.cat([sums.float(), inner], dim=1)
            self._ranks.stage.add(both)
            sums, inner = weight.biased(both[:, : weight.num_rows]), both[:, weight.num_rows :]
        result = sums.to(weight.dtype)
        if room is not None and lora is not None and inner is not None:
            room.add(sums, inner, lora, result)
        if weight.activation is None:
            return result
        activate = elementwise.activate_and_mul if weight.is_gated else elementwise.activate
        return activate(result, weight.activation)

    def embedding(
        self,
        indices: Tensor,
        table: Tensor | PackedLinear,
        first_row: int | None = None,
        scale: float = 1.0,
        virtual: VirtualRows | None = None,
    ) -> Tensor:
        rows = cast("Tensor", table)
        if first_row is None and virtual is None and scale == 1.0:
            return rows.index_select(0, indices)
        places = indices - (first_row or 0)
        is_here = (places >= 0) & (places < len(rows))
        found = rows.index_select(0, places.where(is_here, 0))
        found[~is_here] = 0
        if scale != 1.0:
            found = (found.float() * scale).to(found.dtype)
        if virtual is not None and not first_row:
            is_virtual = indices >= virtual.first_id
            found[is_virtual] = virtual.rows[indices[is_virtual] - virtual.first_id]
        if first_row is not None:
            self._ranks.stage.add_bits(found)
        return found

    def join(self, ranks: Ranks) -> None:
        self._joined = ranks

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, width, dtype=dtype, device=self.device)
        self._ranks.receive(rows)
        return rows

    def send(self, rows: Tensor) -> None:
        self._ranks.send(rows.contiguous())

    @property
    def _ranks(self) -> Ranks:
        assert self._joined is not None, "a share of a model, and no group"
        return self._joined

    def add_normed(
        self, hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor, scale: float = 1.0
    ) -> Tensor:
        return elementwise.add(elementwise.normalise(hidden, weight, epsilon), residual, scale)

    def paged_attention(
        self,
        query: Tensor,
        batch: AttentionBatch,
        kv_pool: Tensor,
        layer: int,
        shape: AttentionShape,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        row_multiple = self._row_multiples.get(shape, attention.ROW_MULTIPLES[0])
        return attention.paged_attention(query, batch, kv_pool, layer, shape, sliding_window, row_multiple, sinks)

    rms_norm = staticmethod(elementwise.rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    add = staticmethod(elementwise.add)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    rotary_and_cache = staticmethod(elementwise.rotary_and_cache)
    swap_blocks = staticmethod(blocks.swap_blocks)
    copy_blocks = staticmethod(blocks.copy_blocks)
    clear_slots = staticmethod(blocks.clear_slots)

    def capture(
        self, forward: Callable[[Tensor, AttentionBatch], Tensor], head: PackedLinear | None, sizes: CaptureSizes
    ) -> CapturedStep | None:
        """Records nothing: torch runs its ops one by one."""
        return None

    def probe(self, linears: Sequence[PackedLinear], shape: AttentionShape) -> bool:
        if self._method is Method.PLAIN:
            return False
        weights = cast("Sequence[ReferenceLinear]", linears)
        packed = [*weights, *self._loras.samples(weights)]
        # Attention without a causal mask cannot be tested in pieces. It uses the same products and sums.
        row_multiple = probe.find_row_multiple(replace(shape, is_causal=True))
        if row_multiple is not None:
            self._row_multiples[shape] = row_multiple
        # Quantized products are exact already.
        settled = probe.settle_linears(linear for linear in packed if not isinstance(linear, ReferenceQuantized))
        found = (row_multiple is not None, settled, probe.elementwise_is_independent(packed))
        return all(found)


def _first_method(device: torch.device) -> Method:
    if device.type != "cpu":
        return Method.PLAIN
    return Method.PREPACKED if can_prepack(torch.float32) else Method.PADDED
