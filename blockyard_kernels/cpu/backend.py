"""The op set in C++ for x86-64 (csrc/). There is one backend object for each dtype and instruction set.

Each op becomes one `Op` structure, which is executed at once or recorded (`OpStream`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from blockyard_kernels import blocks, planning
from blockyard_kernels.cpu import self_test
from blockyard_kernels.cpu.build import library_path
from blockyard_kernels.cpu.drafting import CpuDrafting
from blockyard_kernels.cpu.huge_pages import HostArena
from blockyard_kernels.cpu.library import Joint, Kind, Library, Op, Scheme, TilesRefused
from blockyard_kernels.cpu.lora import CpuLoraOps
from blockyard_kernels.cpu.mixture.ops import CpuMixtureOps
from blockyard_kernels.cpu.op_stream import OpStream
from blockyard_kernels.cpu.packed import ELEMENT_TYPES, CpuLinear
from blockyard_kernels.cpu.plan import Recording
from blockyard_kernels.cpu.processors import chosen_instruction_sets, supported_instruction_sets
from blockyard_kernels.cpu.products import CpuWeight, Products
from blockyard_kernels.cpu.quantized import Int4Linear, Int8Linear
from blockyard_kernels.cpu.rows import RowOps, address_of, is_wide
from blockyard_kernels.cpu.sampling import CpuSampling
from blockyard_kernels.invariance import NUM_ROWS, attention_keeps_rows, keeps_rows, random_numbers
from blockyard_kernels.launching import IMMEDIATE, Launcher
from blockyard_kernels.lora import LoraOps, LoraRows, VirtualRows
from blockyard_kernels.packed import QuantizedWeight, WeightRows
from blockyard_kernels.shapes import PLAIN_LINEAR, AttentionShape, LinearSpec, QueryKeyNorms, scale_width

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.capture import CapturedStep, CaptureSizes
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.drafting import DraftingOps
    from blockyard_kernels.mixture.ops import MixtureOps
    from blockyard_kernels.ops import AttentionBatch, PackedLinear

log = logging.getLogger(__name__)
_CPU = torch.device("cpu")


@cache
def choose_backend(dtype: torch.dtype, cpu_kernels: str, quantization: str) -> CpuBackend | None:
    """Returns the backend for a dtype. If torch must be used instead, logs the reason and returns None.

    Args:
        dtype: the dtype of rows, unquantized weights and KV pools.
        cpu_kernels: the instruction set, or "auto".
        quantization: the format of all linear weights, or "none".

    Raises:
        ValueError: an instruction set was requested by name and is not available.
    """
    if cpu_kernels == "auto":
        return _choose(dtype, quantization)
    if cpu_kernels not in supported_instruction_sets() or not library_path(cpu_kernels).exists():
        raise ValueError(f"no kernels for {cpu_kernels}: this processor lacks it, or they were not built")
    if dtype not in ELEMENT_TYPES:
        raise ValueError(f"the {cpu_kernels} kernels know no {dtype}")
    try:
        backend = CpuBackend(dtype, cpu_kernels, quantization)
    except TilesRefused as error:
        raise ValueError(f"no kernels for {cpu_kernels}: {error}") from None
    if backend.arithmetic is None:
        log.warning("the %s kernels compute otherwise here than on the processors that they were made on", cpu_kernels)
    return backend


def _choose(dtype: torch.dtype, quantization: str) -> CpuBackend | None:
    """Takes the processor's first instruction set whose kernels pass the self-test."""
    names = chosen_instruction_sets()
    why = "were not built for this processor (make setup builds them)"
    if names and dtype not in ELEMENT_TYPES:
        names, why = (), f"know no {dtype}"
    for name in names:
        why = "of this processor cannot serve"
        try:
            backend = CpuBackend(dtype, name, quantization)
        except TilesRefused as error:
            log.warning("no %s kernels: %s", name, error)
            continue
        if backend.arithmetic is not None:
            return backend
        log.warning("no %s kernels: they fail their self-test on this processor; asked for by name, they serve", name)
    if quantization == "none":
        log.warning("the CPU kernels %s: the reference kernels serve, which are slower", why)
    return None


class CpuBackend(RowOps, planning.AttentionPlanning):
    """See `blockyard_kernels.ops.Backend`."""

    device = _CPU
    is_complete = True
    packs_into_arenas = True
    launcher: Launcher = IMMEDIATE

    def __init__(self, dtype: torch.dtype, instruction_set: str, quantization: str = "none") -> None:
        self._library = Library(instruction_set)
        self.name = f"cpu/{instruction_set}" + ("" if quantization == "none" else f"/{quantization}")
        self._linear_type = Int8Linear if quantization == "int8" else CpuLinear
        self._dtype = dtype
        executor = self._library.create_executor(torch.get_num_threads())
        super().__init__(OpStream(executor, ELEMENT_TYPES[dtype]))
        self.sampling = CpuSampling(executor)
        self.drafting: DraftingOps = CpuDrafting(self._library)
        self.lora: LoraOps | None
        loras = self.lora = CpuLoraOps(self._library, dtype)
        self._products = Products(self._ops, dtype, loras)
        self.mixture: MixtureOps | None = CpuMixtureOps(self._ops, self._products, self._linear_type)
        # None if the products match none of the arithmetics that the library knows.
        self.arithmetic = self_test.find_arithmetic(
            self._library, self._product, dtype, self_test.candidates(instruction_set, dtype, quantization)
        )
        self.identity = f"{self._library.digest}/{'unknown' if self.arithmetic is None else self.arithmetic.name}"

    def _product(self, rows: Tensor, weight: Tensor, leaves: int) -> Tensor:
        packed = self._linear_type(self._ops.executor, HostArena(), [weight], None, LinearSpec(leaves=leaves))
        return self.linear(rows, packed, wide=True)

    def _grouped_product(self, rows: Tensor, weight: QuantizedWeight, leaves: int) -> Tensor:
        packed = Int4Linear(self._ops.executor, HostArena(), weight, None, LinearSpec(leaves=leaves))
        return self.linear(rows, packed, wide=True)

    def set_num_threads(self, num_threads: int) -> None:
        """Sets how many threads compute, torch's own among them."""
        torch.set_num_threads(num_threads)
        if num_threads != self._ops.executor.num_threads:
            executor = self.sampling.executor = self._library.create_executor(num_threads)
            self._ops.set_executor(executor)

    def pack_linear(
        self,
        weight: WeightRows,
        bias: Tensor | None = None,
        spec: LinearSpec = PLAIN_LINEAR,
        arena: Arena | None = None,
    ) -> PackedLinear:
        place = (self._ops.executor, arena or HostArena())
        if isinstance(weight, QuantizedWeight):
            linear_type = Int8Linear if weight.zeros is None else Int4Linear
            return linear_type(*place, weight, bias, spec)
        return self._linear_type(*place, [weight] if isinstance(weight, Tensor) else weight, bias, spec)

    def linear(
        self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False, lora: LoraRows | None = None
    ) -> Tensor:
        return self._products.linear(hidden, cast("CpuWeight", packed), wide=wide, lora=lora)

    def embedding(
        self,
        indices: Tensor,
        table: Tensor | PackedLinear,
        first_row: int | None = None,
        scale: float = 1.0,
        virtual: VirtualRows | None = None,
    ) -> Tensor:
        if isinstance(table, Tensor):
            kind, (num_rows, width), address = Kind.EMBEDDING, table.shape, table.data_ptr()
        else:
            weight = cast("CpuLinear", table)
            kind, address = Kind.EMBEDDING_PACKED, weight.weight.data_ptr()
            num_rows, width = weight.num_rows, weight.in_features
        output = torch.empty(len(indices), width, dtype=self._dtype)
        op = self._ops.make(
            kind,
            weight=address,
            indices=indices.data_ptr(),
            output=output.data_ptr(),
            out_features=width,
            scale=scale,
        )
        if first_row is not None:
            op.first_row, op.num_rows = first_row, num_rows
        if virtual is not None and not first_row:
            op.virtual_rows, op.first_virtual = virtual.rows.data_ptr(), virtual.first_id
        self._ops.emit(op, output)
        if first_row is not None:
            self._ops.meet(Joint.ADD_BITS, output)
        return output

    def join(self, ranks: Ranks) -> None:
        self._ops.join(ranks)

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, width, dtype=dtype)
        self._ops.meet(Joint.RECEIVE, rows)
        return rows

    def send(self, rows: Tensor) -> None:
        self._ops.meet(Joint.SEND, rows)

    def rotary_and_cache(
        self,
        qkv: Tensor,
        rotary: Tensor | None,
        batch: AttentionBatch,
        kv_pool: Tensor,
        layer: int,
        shape: AttentionShape,
        norms: QueryKeyNorms | None = None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        op = self._pool_op(Kind.ROTARY_AND_CACHE, kv_pool, layer, shape)
        op.input, op.input_stride = qkv.data_ptr(), qkv.shape[1]
        if rotary is not None:
            rotary = rotary.contiguous()
            op.residual, op.rotary_size, op.rotary_stride = rotary.data_ptr(), rotary.shape[2], rotary.stride(0)
        if norms is not None:
            op.query_norm, op.key_norm = norms.query.data_ptr(), norms.key.data_ptr()
            op.epsilon, op.has_wide_norms = norms.epsilon, is_wide(norms.query)
            op.norms_whole_rows, op.norms_follow = norms.are_of_whole_rows, norms.follow_rotation
        self._ops.emit(op, batch=batch)
        return qkv.as_strided((len(qkv), shape.num_heads, shape.head_dim), (qkv.shape[1], shape.head_dim, 1))

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
        if query.stride()[1:] != (shape.head_dim, 1):
            query = query.contiguous()
        output = torch.empty(query.shape[0], shape.num_heads * shape.head_dim, dtype=self._dtype)
        op = self._pool_op(Kind.ATTENTION, kv_pool, layer, shape)
        op.input, op.input_stride, op.output = query.data_ptr(), query.stride(0), output.data_ptr()
        op.window, op.softcap, op.sinks = sliding_window or 0, shape.softcap, address_of(sinks)
        op.sees_later = not shape.is_causal
        self._ops.emit(op, output, batch=batch)
        return output

    def _pool_op(self, kind: Kind, kv_pool: Tensor, layer: int, shape: AttentionShape) -> Op:
        return self._ops.make(
            kind,
            pool=kv_pool.data_ptr(),
            block_stride=kv_pool.stride(0),
            layer_offset=layer * kv_pool.stride(1),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=kv_pool.shape[4],
            scale=shape.scale,
            kv_scheme=Scheme.INT8 if kv_pool.dtype == torch.int8 else Scheme.UNQUANTIZED,
        )

    swap_blocks = staticmethod(blocks.swap_blocks)
    copy_blocks = staticmethod(blocks.copy_blocks)

    def clear_slots(
        self, pool: Tensor, block_ids: npt.NDArray[np.integer[Any]], slots: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Clears slots of blocks, whose inner layout is that of csrc/attention.h."""
        words, size, scale = 4 // pool.itemsize, pool.shape[4], scale_width(pool.dtype)
        dim, blocks_, slots_ = pool.shape[5] - scale, torch.from_numpy(block_ids), torch.from_numpy(slots)
        numbers, scales = pool.flatten(4).split([size * dim, size * scale], -1)
        keys, values = numbers[:, :, 0], numbers[:, :, 1]
        keys.unflatten(-1, (dim // words, size, words))[blocks_, :, :, :, slots_] = 0
        values.unflatten(-1, (size // words, dim, words))[blocks_, :, :, slots_ // words, :, slots_ % words] = 0
        if scale:
            scales.unflatten(-1, (size, scale))[blocks_, :, :, :, slots_] = 0

    def capture(
        self, forward: Callable[[Tensor, AttentionBatch], Tensor], head: PackedLinear | None, sizes: CaptureSizes
    ) -> CapturedStep | None:
        token_ids = torch.zeros(1, dtype=torch.int64)
        tables = [[0]] * sizes.num_kv_groups
        window = sizes.sliding_window
        batch = self.plan_attention([1], [1], tables, sizes.block_size, window, sizes.num_kv_groups)
        weight = cast("CpuWeight | None", head)
        return self._ops.record(
            Recording(token_ids, batch.positions),
            # Ops of adapters are recorded, and skipped in steps without adapters.
            lambda: forward(token_ids, replace(batch, lora=LoraRows(np.zeros(1, np.int32)))),
            lambda hidden: None if weight is None else self._products.linear_op(Kind.HEAD, hidden, weight),
            sizes,
        )

    def probe(self, linears: Sequence[PackedLinear], shape: AttentionShape) -> bool:
        """Returns true without a test if the arithmetic is known: then every sum has one order by construction.

        If the arithmetic is unknown, it tests the linears and attention.
        """
        has_groups = any(isinstance(linear, Int4Linear) for linear in linears)
        knows_groups = not has_groups or self_test.knows_groups(self._grouped_product, self._dtype)
        if self.arithmetic is not None and knows_groups:
            return True
        alike = {(linear.in_features, linear.out_features, type(linear)): linear for linear in linears}
        # Attention without a causal mask cannot be tested in pieces. It uses the same products and sums.
        causal = replace(shape, is_causal=True)
        return all(map(self._keeps_rows, alike.values())) and attention_keeps_rows(
            lambda rows, batch, pool: self.paged_attention(rows, batch, pool, 0, causal),
            causal,
            self._dtype,
            self.set_num_threads,
        )

    def _keeps_rows(self, linear: PackedLinear) -> bool:
        rows = random_numbers(NUM_ROWS, linear.in_features, seed=7).to(self._dtype)
        return keeps_rows(lambda part: self.linear(part, linear), rows, self.set_num_threads)
