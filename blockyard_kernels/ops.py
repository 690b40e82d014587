"""The op set: the ops that a network definition may call, documented once for all backends.

This module defines the shapes, dtypes and aliasing of ops, the layout of the KV pool and the metadata that layers
share. It knows nothing of networks, sequence ids, sampling settings or the allocation of pools.

Letters in shapes: T tokens of the step, S scheduled sequences, H query heads, K key-value heads, D head_dim. Unless an
op says otherwise its tensors are contiguous, on the backend's device, in the model's dtype (float32, bfloat16 or
float16), its results are new tensors, and its inputs stay as they were.

The KV pool is one tensor `[num_blocks, num_layers, 2, K, block_size, D]` (0 keys, 1 values): a block is one contiguous
range over all layers. A pool need not be cleared when it is made or when a block changes hands: writing a block's first
slot clears the rest of that block in the layer, and attention reads no block that holds none of the sequence's tokens.

An int8 pool is quantized, and its last dimension is D + 4: each token's key or value of a head is held in int8, with a
float32 scale of its own, as `reference.int8` defines. A backend may put the scales anywhere within the block's bytes of
this head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard_kernels.shapes import PLAIN_LINEAR, AttentionShape, LinearSpec, QueryKeyNorms

if TYPE_CHECKING:
    from blockyard_kernels.arena import Arena
    from blockyard_kernels.capture import CapturedStep, CaptureSizes
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.drafting import DraftingOps
    from blockyard_kernels.launching import Launcher
    from blockyard_kernels.lora import LoraOps, LoraRows, VirtualRows
    from blockyard_kernels.mixture.ops import MixtureOps
    from blockyard_kernels.packed import PackedLinear, WeightRows
    from blockyard_kernels.recurrent.ops import RecurrentOps
    from blockyard_kernels.sampling import SamplingOps

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
BlockTables = Sequence[Sequence[int] | Tensor] | npt.NDArray[np.integer[Any]]
BlockPairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """A step's attention metadata, shared by all layers. `Backend.plan_attention` makes it; it is never changed."""

    num_new_tokens: npt.NDArray[np.int64]
    """[S]: tokens of each sequence that the step computes; a sequence with 0 tokens has no rows."""
    seq_lens: npt.NDArray[np.int64]
    """[S]: tokens of each sequence after the step."""
    block_tables: npt.NDArray[np.int64]
    """[S, widest]: block ids in order; entries past a sequence's length are never read."""
    positions: Tensor
    """[T] int64 on the device: each row's position, sequence by sequence."""
    slot_mapping: Tensor
    """[T] int64 on the device: `block id * block_size + offset` of each row."""
    fresh_blocks: Tensor
    """[any] int64 on the device: blocks that get their first token in this step and are not filled by it."""
    block_size: int
    sliding_window: int | None
    """The sliding window, in keys, of the layers that have one; None: no layer has one."""
    kv_group: int = 0
    """The KV group whose block tables these are."""
    others: tuple[AttentionBatch, ...] = ()
    """The metadata of the same step for the other KV groups, in order."""
    work_lists: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    """A cache of the backend: schedules that the first layer makes and later layers reuse."""
    lora: LoraRows | None = None
    """The LoRA slots of the rows; None: no row has an adapter."""
    fixed_tables: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    """[S, F]: the fixed blocks of each sequence, which hold its state; F is 0 if layers have none."""

    @property
    def num_tokens(self) -> int:
        """T: rows of the step."""
        return self.positions.shape[0]

    def of_group(self, kv_group: int) -> AttentionBatch:
        """Returns the metadata for the layers of a KV group."""
        return self.others[kv_group - 1] if kv_group else self


class Backend(Protocol):
    """The ops on one device."""

    name: str
    device: torch.device

    @property
    def is_complete(self) -> bool:
        """Whether it has all ops. If not, it has those of dense decoder models with a single KV group."""
        ...

    @property
    def packs_into_arenas(self) -> bool:
        """Whether packed weights lie completely in the arena that `pack_linear` gets."""
        ...

    @property
    def sampling(self) -> SamplingOps:
        """The ops of sampling."""
        ...

    @property
    def drafting(self) -> DraftingOps:
        """The ops of drafting."""
        ...

    @property
    def lora(self) -> LoraOps | None:
        """The ops of LoRA adapters; None: this backend has none."""
        ...

    @property
    def mixture(self) -> MixtureOps | None:
        """The ops of mixtures of experts; None: this backend has none."""
        ...

    @property
    def recurrent(self) -> RecurrentOps | None:
        """The ops of layers with a state, and of gated attention; None: this backend has none."""
        ...

    @property
    def launcher(self) -> Launcher:
        """The launcher of the device's steps."""
        ...

    @property
    def identity(self) -> str:
        """A string for all that results depend on besides source code and device: libraries, versions, arithmetic."""
        ...

    def set_num_threads(self, num_threads: int) -> None:
        """Sets how many threads compute. Batch-invariant results do not depend on it."""

    def plan_attention(
        self,
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        seq_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        block_tables: BlockTables,
        block_size: int,
        sliding_window: int | None = None,
        num_kv_groups: int = 1,
        fixed_tables: npt.NDArray[np.integer[Any]] | None = None,
    ) -> AttentionBatch:
        """Makes a step's attention metadata.

        Args:
            num_new_tokens: [S] tokens to compute of each sequence: any mix of decodes (1), pieces of a prefill, and 0.
            seq_lens: [S] length of each sequence after this step.
            block_tables: block ids of each sequence in order, enough for its length: lists, int tensors or a padded
                array [groups * S, widest]. The tables of the first KV group come first, then those of the other groups.
                Ids of blocks that lie completely before the sliding window of a group's layers are not read.
            block_size: tokens of a block, one of BLOCK_SIZES.
            sliding_window: number of keys that a query sees, with its own, in layers that have a window; None: all.
            num_kv_groups: number of groups of layers, each of which has its own block tables; 0: there is no attention.
            fixed_tables: [S, F] ids of the blocks with each sequence's state; None: layers have none.

        Raises:
            ValueError: the lengths are inconsistent, or the block size is not in BLOCK_SIZES.
        """
        ...

    def pack_linear(
        self,
        weight: WeightRows,
        bias: Tensor | None = None,
        spec: LinearSpec = PLAIN_LINEAR,
        arena: Arena | None = None,
    ) -> PackedLinear:
        """Packs a weight [rows, in_features] and a bias [rows].

        The result may alias or copy both: the caller must drop its references and must not write to them. A weight in
        parts is always copied, so the parts may be views of a file.

        Args:
            weight: out_features rows, or twice as many if the spec is `gated`. The rows may come in parts, in order,
                for projections of the same input that are packed together. A quantized weight keeps its levels and
                scales: `blockyard_kernels.reference.quantized` defines its product.
            bias: [rows], or None.
            spec: the activation, the logit transform and the summation of the inner dimension.
            arena: the arena for the packed weight, if the backend `packs_into_arenas`; None: newly allocated memory.
        """
        ...

    def linear(
        self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False, lora: LoraRows | None = None
    ) -> Tensor:
        """Multiplies rows [R, in_features] (row stride free) by a packed weight -> [R, out_features].

        If `wide`, the result is float32, unrounded if the backend can; not for a gated or partial weight, and not with
        `lora`. If the weight has LoRA slots (`blockyard_kernels.lora`), products of the adapters in `lora` are added.
        """
        ...

    def embedding(
        self,
        indices: Tensor,
        table: Tensor | PackedLinear,
        first_row: int | None = None,
        scale: float = 1.0,
        virtual: VirtualRows | None = None,
    ) -> Tensor:
        """Looks up rows `indices` [T] int64 of a table [N, width] or of a packed weight that `is_table` -> [T, width].

        Rows of the table are multiplied by `scale` in float32 and rounded once.

        If `first_row` is given, the table is a shard that starts at this row of the whole table, and the other ranks
        that the backend has joined hold the other shards. Ids from `virtual.first_id` on select rows of `virtual`.
        """
        ...

    def join(self, ranks: Ranks) -> None:
        """Sets the ranks that share partial weights and tables, and the pipeline stages; for captured steps too."""

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Receives rows [num_rows, width] from the previous pipeline stage."""
        ...

    def send(self, rows: Tensor) -> None:
        """Sends rows [T, width] to the next pipeline stage."""

    def rms_norm(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        epsilon: float,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Adds the residual, then normalises each row by its root mean square in float32.

        Args:
            hidden: [T, width].
            weight: [width], or None for ones. Normalised rows are rounded before a weight in the model's dtype
                multiplies them, but after a weight in float32 does.
            epsilon: added to the mean square.
            residual: [T, width], or None for nothing to add.
            scale: factor of `hidden`; only used with a residual.

        Returns:
            The normalised rows times the weight, and the new residual: `residual + scale * hidden`, rounded once, or
            `hidden` if there is no residual.
        """
        ...

    def layer_norm(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Adds the residual, then normalises each row by its mean and variance, all in float32, rounded once.

        Args:
            hidden: [T, width].
            weight: [width] float32, or None for ones.
            bias: [width] float32, or None for zeros.
            epsilon: added to the variance.
            residual, scale: as in `rms_norm`, and so are the results.
        """
        ...

    def add_normed(
        self, hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor, scale: float = 1.0
    ) -> Tensor:
        """Computes `residual + scale * rms_norm(hidden)` -> [T, width]; both the norm and the sum are rounded."""
        ...

    def add(self, hidden: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        """Computes `residual + scale * hidden` [T, width] in float32, rounded once."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Computes `silu(gate) * up` for rows [T, 2 * width], gate first -> [T, width]; the activation in float32."""
        ...

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
        """Rotates queries and keys and writes keys and values to their slots.

        Args:
            qkv: [T, (H + 2K) * D], queries, keys, values; may be overwritten. If the shape has gates:
                [T, 2 * (H + K) * D], queries, gates, keys, values, of which the gates stay as they are.
            rotary: [T, 2, R]: cosines and sines of each row, with the sines of the first half negated, so that
                `x * cos + roll(x, R / 2) * sin` rotates the pairs (i, i + R / 2) of a head's first R numbers, R <= D.
                [T, 4, R]: cosines and sines for keys, then cosines and sines for queries. None: no rotation.
            batch: the step.
            kv_pool: written at `batch.slot_mapping` in this layer; the rest of `batch.fresh_blocks` is cleared. In the
                model's dtype, or int8.
            layer: index of the layer in the pool.
            shape: the model's heads.
            norms: RMS norms of queries and keys, applied before or after the rotation; None: no norms.

        Returns:
            The queries [T, H, D].
        """
        ...

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
        """Attends each row to its sequence's keys, up to its own position if the shape is causal -> [T, H * D].

        Computed in float32 and rounded once. The keys and values of the step's own tokens must be in the pool already.

        Args:
            query: [T, H, D].
            batch, kv_pool, layer, shape: as in `rotary_and_cache`; the pool is only read.
            sliding_window: as in `plan_attention`, for this layer.
            sinks: [H] float32, attention sinks: one more score per head in the softmax, without a value; None: none.
        """
        ...

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: BlockPairs) -> None:
        """Copies whole blocks between two pools of equal layout (on a GPU also between two devices), bit for bit.

        Destinations must be distinct. Returns when the copies are complete.

        Raises:
            ValueError: an id is outside its pool, or the layouts of the pools differ.
        """

    def clear_slots(
        self, pool: Tensor, block_ids: npt.NDArray[np.integer[Any]], slots: npt.NDArray[np.integer[Any]]
    ) -> None:
        """Writes zeros to slots of blocks, in all layers. Both columns have the same length."""

    def copy_blocks(self, pool: Tensor, pairs: BlockPairs) -> None:
        """Copies whole blocks within a pool, bit for bit, as if all at once: every source is read before any write.

        Destinations must be distinct.

        Raises:
            ValueError: an id is outside the pool.
        """

    def capture(
        self, forward: Callable[[Tensor, AttentionBatch], Tensor], head: PackedLinear | None, sizes: CaptureSizes
    ) -> CapturedStep | None:
        """Captures a network's step, to be replayed with other inputs. Returns None if the backend cannot capture it.

        Args:
            forward: computes normed hidden rows [T, hidden_size] from token ids [T] and a batch, with this backend's
                ops only. The weights and the pool that it uses must live as long as the captured step.
            head: the LM head, which computes logits of the hidden rows; None: a later pipeline stage has it.
            sizes: the largest step.
        """
        ...

    def probe(self, linears: Sequence[PackedLinear], shape: AttentionShape) -> bool:
        """Tests on this machine that results are batch-invariant, for every shape that a model uses.

        If a method of computing fails, the backend takes the next method of its ladder permanently and packs `linears`
        again. Run it before the first step.

        Returns:
            Whether results are batch-invariant.
        """
        ...


def kv_pool_shape(
    num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, width: int
) -> tuple[int, int, int, int, int, int]:
    """Returns the shape of a KV pool, in which each block holds all layers. `width`: D, or see `shapes.scale_width`."""
    check_block_size(block_size)
    return num_blocks, num_layers, 2, num_kv_heads, block_size, width


def check_block_size(block_size: int) -> None:
    """Raises ValueError unless whole blocks fit into attention's splits of 256 keys."""
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")
