"""The GPU backend: Triton kernels, cuBLAS where it is allowed, and CUDA graphs of steps. Owns no tensors.

It is batch-invariant only if `invariant` is set: then products use the ladder of `blockyard_kernels.cuda.linear`, and
attention is split at fixed positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
from torch import Tensor

from blockyard_kernels import blocks, planning
from blockyard_kernels.cuda import attention, elementwise
from blockyard_kernels.cuda.gemm import num_multiprocessors
from blockyard_kernels.cuda.graphs import CapturedSteps, Recording
from blockyard_kernels.cuda.linear import CudaLinear, settle
from blockyard_kernels.cuda.lora.slots import CudaLoraOps, LoraRoom
from blockyard_kernels.cuda.quantized import FORMATS, Format, Quantized
from blockyard_kernels.cuda.rows import norms as row_norms
from blockyard_kernels.cuda.rows import rotary as row_rotary
from blockyard_kernels.cuda.sampling import CudaSampling
from blockyard_kernels.cuda.warm_up import warm_up
from blockyard_kernels.launching import IMMEDIATE, CudaLauncher, Launcher
from blockyard_kernels.packed import QuantizedWeight, WeightRows
from blockyard_kernels.shapes import PLAIN_LINEAR, AttentionShape, LinearSpec
from blockyard_kernels.suffixes import HostDrafting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.capture import CapturedStep, CaptureSizes
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.drafting import DraftingOps
    from blockyard_kernels.lora import LoraRows, VirtualRows
    from blockyard_kernels.mixture.ops import MixtureOps
    from blockyard_kernels.ops import AttentionBatch, PackedLinear
    from blockyard_kernels.recurrent.ops import RecurrentOps


class CudaBackend(planning.AttentionPlanning):
    """See `blockyard_kernels.ops.Backend`."""

    is_complete = False
    packs_into_arenas = True

    def __init__(self, device: torch.device, *, invariant: bool = False, quantization: str = "none") -> None:
        """Makes a backend of a device.

        Args:
            device: the device to compute on.
            invariant: whether a row must have the same bits in every step, which is slower.
            quantization: the format of all linear weights: one of `blockyard_kernels.cuda.quantized.FORMATS`.
        """
        self.device = device
        # Otherwise cuBLAS may add partial sums in bfloat16, how many depends on the batch.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        kinds = {"invariant": invariant, quantization: quantization != "none"}
        self.name = "/".join(["cuda", *(kind for kind, holds in kinds.items() if holds)])
        self._eight_bits = FORMATS[quantization]
        # The quantized rows of the last norm: usually the next product reads them.
        self._normed: Quantized | None = None
        on_gpu = device.type == "cuda"
        self.launcher: Launcher = CudaLauncher(device) if on_gpu else IMMEDIATE
        self.sampling = CudaSampling(device)
        self.drafting: DraftingOps = HostDrafting()
        self.lora = CudaLoraOps(device)
        self.mixture: MixtureOps | None = None
        self.recurrent: RecurrentOps | None = None
        # In fast mode the number of multiprocessors decides how attention is split, and so influences the bits.
        gpu = f"{torch.cuda.get_device_name(device)}/{num_multiprocessors(device)}" if on_gpu else "none"
        self.identity = f"{torch.__version__}/{torch.version.cuda}/{triton.__version__}/{gpu}"
        self.record: Callable[[Callable[[], Tensor], Any], Recording] = Recording
        self._invariant = invariant
        self._joined: Ranks | None = None

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
        """Packs a weight and a bias. Leaves are summed separately only in invariant mode."""
        if isinstance(weight, QuantizedWeight):
            raise ValueError(f"{self.name} has no products of weights that a checkpoint has quantized")
        kept = spec if self._invariant else replace(spec, leaves=1)
        packed = CudaLinear(weight, bias, kept, eight_bits=self._eight_bits)
        if arena is not None:
            packed.move_to(arena)
        return packed

    def linear(
        self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False, lora: LoraRows | None = None
    ) -> Tensor:
        weight = cast("CudaLinear", packed)
        room = None if lora is None else self.lora.find(weight)
        if room is not None and lora is not None:
            return self._adapted(hidden, weight, room, lora)
        if not weight.is_partial:
            return weight(hidden, wide=wide, known=self._normed)
        sums = weight(hidden)
        self._ranks.stage.add(sums)
        return weight.finished(sums)

    def _adapted(self, hidden: Tensor, weight: CudaLinear, room: LoraRoom, lora: LoraRows) -> Tensor:
        """Multiplies all rows without adapters, then overwrites the rows that have one."""
        sums, inner = weight.sums(hidden, self._normed), room.shrink(hidden, lora)
        if weight.is_partial:
            both = torch.cat([sums, inner], dim=1)
            self._ranks.stage.add(both)
            num_columns = sums.shape[1]
            sums, inner = both[:, :num_columns].contiguous(), both[:, num_columns:]
        result = weight.finished(sums)
        room.expand(sums, inner, lora, result)
        return result

    def embedding(
        self,
        indices: Tensor,
        table: Tensor | PackedLinear,
        first_row: int | None = None,
        scale: float = 1.0,
        virtual: VirtualRows | None = None,
    ) -> Tensor:
        rows = table if isinstance(table, Tensor) else cast("CudaLinear", table).weight
        found = elementwise.embedding(indices, rows, first_row or 0, scale, None if first_row else virtual)
        if first_row is not None:
            self._ranks.stage.add_bits(found)
        return found

    def join(self, ranks: Ranks) -> None:
        self._joined = ranks

    @property
    def _ranks(self) -> Ranks:
        assert self._joined is not None, "a share of a model, and no group"
        return self._joined

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, width, dtype=dtype, device=self.device)
        self._ranks.receive(rows)
        return rows

    def send(self, rows: Tensor) -> None:
        self._ranks.send(rows)

    def rms_norm(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        epsilon: float,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        normed, total, self._normed = row_norms.norm(hidden, weight, epsilon, residual, scale, self._row_format)
        return normed, total

    @property
    def _row_format(self) -> Format | None:
        """The format to which rows are quantized before a product; None: rows are not quantized."""
        return self._eight_bits if self._eight_bits is not None and self._eight_bits.quantizes_rows else None

    def layer_norm(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        normed, total, self._normed = row_norms.norm(
            hidden, weight, epsilon, residual, scale, self._row_format, bias=bias, is_centred=True
        )
        return normed, total

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
        if not shape.is_causal:
            raise NotImplementedError(f"{self.name} has no attention to keys behind a row")
        return attention.paged_attention(
            query, batch, kv_pool, layer, shape, sliding_window, sinks,
            invariant=self._invariant, num_multiprocessors=num_multiprocessors(self.device),
        )  # fmt: skip

    add_normed = staticmethod(row_norms.add_normed)
    add = staticmethod(row_norms.add)
    silu_and_mul = staticmethod(elementwise.silu_and_mul)
    rotary_and_cache = staticmethod(row_rotary.rotary_and_cache)
    swap_blocks = staticmethod(blocks.swap_blocks)
    copy_blocks = staticmethod(blocks.copy_blocks)
    clear_slots = staticmethod(blocks.clear_slots)

    def capture(
        self, forward: Callable[[Tensor, AttentionBatch], Tensor], head: PackedLinear | None, sizes: CaptureSizes
    ) -> CapturedStep | None:
        """Captures steps as CUDA graphs (`blockyard_kernels.cuda.graphs`) if one rank computes the whole network."""
        if not sizes.max_length:
            return None
        if self.device.type == "cuda":
            warm_up(self, forward, head, sizes)
        if head is None or self._joined is not None:
            return None

        def to_logits(rows: Tensor) -> Tensor:
            return self.linear(rows, head, wide=True)

        captured = CapturedSteps(forward, to_logits, sizes, self.device, self.record)
        if sizes.is_trial:
            captured.estimate()
        elif self.device.type == "cuda":
            captured.capture_ahead()
        return captured

    def probe(self, linears: Sequence[PackedLinear], shape: AttentionShape) -> bool:
        """In invariant mode, tests which methods keep the bits of products. Attention is invariant by construction."""
        return self._invariant and settle(cast("Sequence[CudaLinear]", linears))
