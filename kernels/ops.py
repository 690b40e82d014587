"""The op set: what a network definition may call, documented once.

Owns the shapes, dtypes and aliasing of ops, the layout of the KV pool and the metadata that layers share. Knows nothing
of networks, sequences' identities, sampling settings or who allocates a pool.

Letters in shapes: T tokens of the step, S scheduled sequences, H query heads, K key-value heads, D head_dim. Unless an
op says otherwise its tensors are contiguous, on the backend's device, in the model's dtype (float32, bfloat16 or
float16), its results are new tensors, and its inputs stay as they were.

The KV pool is one tensor `[num_blocks, num_layers, 2, K, block_size, D]` (0 keys, 1 values): a block is one contiguous
range over all layers. A pool need not be cleared when it is made or when a block changes hands: writing a block's first
slot clears the rest of that block in the layer, and attention reads no block that holds none of the sequence's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.shapes import PLAIN_LINEAR, LinearSpec

if TYPE_CHECKING:
    from kernels.arena import Arena
    from kernels.capture import CapturedStep, CaptureSizes
    from kernels.collectives import Ranks
    from kernels.launching import Launcher
    from kernels.lora import LoraOps, LoraRows, VirtualRows
    from kernels.mixture.ops import MixtureOps
    from kernels.packed import PackedLinear, WeightRows
    from kernels.sampling import SamplingOps
    from kernels.shapes import AttentionShape, QueryKeyNorms

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
BlockTables = Sequence[Sequence[int] | Tensor] | npt.NDArray[np.integer[Any]]
BlockPairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBatch:
    """The metadata that all layers share, made by `Backend.plan_attention`, never changed, dropped after the step."""

    num_new_tokens: npt.NDArray[np.int64]
    """[S]: tokens that the step computes of each sequence; 0 is legal and has no rows."""
    seq_lens: npt.NDArray[np.int64]
    """[S]: tokens of each sequence after the step."""
    block_tables: npt.NDArray[np.int64]
    """[S, widest]: block ids in order; what is past a sequence's length is never read."""
    positions: Tensor
    """[T] int64 on the device: each row's position, sequence by sequence."""
    slot_mapping: Tensor
    """[T] int64 on the device: `block id * block_size + offset` of each row."""
    fresh_blocks: Tensor
    """[any] int64 on the device: blocks that get their first token in this step and are not filled by it."""
    block_size: int
    sliding_window: int | None
    """Of the layers that have one."""
    kv_group: int = 0
    """The KV group whose block tables these are."""
    others: tuple[AttentionBatch, ...] = ()
    """The same step for the KV groups behind the first, in order."""
    work_lists: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    """The backend's own schedule, kept for the layers after the first."""
    lora: LoraRows | None = None
    """The rows that have a LoRA adapter; None: none has."""

    @property
    def num_tokens(self) -> int:
        """T: rows of the step."""
        return self.positions.shape[0]

    def of_group(self, kv_group: int) -> AttentionBatch:
        """Returns what the layers of a KV group share."""
        return self.others[kv_group - 1] if kv_group else self


class Backend(Protocol):
    """The ops on one device."""

    name: str
    device: torch.device

    @property
    def is_complete(self) -> bool:
        """Whether it has all ops; else those alone that decoders of dense layers need, which are one KV group."""
        ...

    @property
    def packs_into_arenas(self) -> bool:
        """Whether packed weights lie in the arena that they are packed into, and nowhere else."""
        ...

    @property
    def sampling(self) -> SamplingOps:
        """The ops of sampling."""
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
    def launcher(self) -> Launcher:
        """What launches the steps of its device."""
        ...

    @property
    def identity(self) -> str:
        """What its results depend on beside its source and the device: what was compiled, and for which processor."""
        ...

    def set_num_threads(self, num_threads: int) -> None:
        """Sets how many threads compute. Results do not depend on it where they are batch-invariant."""
        ...

    def plan_attention(
        self,
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        seq_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        block_tables: BlockTables,
        block_size: int,
        sliding_window: int | None = None,
        num_kv_groups: int = 1,
    ) -> AttentionBatch:
        """Makes a step's attention metadata.

        Args:
            num_new_tokens: [S] tokens to compute of each sequence: any mix of decodes (1), pieces of a prefill, and 0.
            seq_lens: [S] length of each sequence after this step.
            block_tables: block ids in order, enough for each length; lists, int tensors or a padded array [S, widest]:
                those of the first KV group, then those of the others, [groups * S, widest]. What lies wholly behind the
                windows of a group's layers is not read.
            block_size: tokens of a block, one of BLOCK_SIZES.
            sliding_window: keys that a query sees, its own among them, in layers that ask for it; None: all.
            num_kv_groups: groups of layers that have block tables of their own.

        Raises:
            ValueError: lengths that do not fit together, or a block size that is none of BLOCK_SIZES.
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

        The result may alias both, or copy them: the caller drops its own references and does not write to them. Of a
        weight in parts it keeps nothing: they may lie in a file.

        Args:
            weight: out_features rows, or twice as many if the spec is `gated`; or its rows in parts, in order, as of
                projections that read the same input and are packed as one. One that is quantized stays as it is given:
                `kernels.reference.int4` defines its product.
            bias: as many, or None.
            spec: its activation, its logits and how its inner dimension is summed.
            arena: where all that is held goes, if the backend `packs_into_arenas`; None: memory of its own.
        """
        ...

    def linear(
        self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False, lora: LoraRows | None = None
    ) -> Tensor:
        """Multiplies rows [R, in_features] (row stride free) by a packed weight -> [R, out_features].

        If `wide` the result is float32, as exact as the backend has it; not for a gated or partial weight, nor beside
        `lora`: rows that have adapters get what these add, where the weight has slots (`kernels.lora`).
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
        """Takes rows [T] int64 of a table [N, width], or of a packed weight that `is_table` -> [T, width].

        `scale` is a factor of what is taken of the table: multiplied in float32, and rounded once.

        If there is a `first_row`, the table has the rows from there on of a larger one, and the other ranks of the
        group that the backend has joined have the rest. Ids behind all of it are those of `virtual` rows.
        """
        ...

    def join(self, ranks: Ranks) -> None:
        """Sets the ranks with which partial weights and tables are shared, and the stages; for captured steps too."""
        ...

    def receive(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Receives rows [num_rows, width] from the stage before this one."""
        ...

    def send(self, rows: Tensor) -> None:
        """Sends rows [T, width] to the stage after this one."""
        ...

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
            weight: [width]: in the model's dtype, what it multiplies is rounded before; in float32, after. None: ones.
            epsilon: added to the mean square.
            residual: [T, width], or None for nothing to add.
            scale: factor of `hidden`, where there is a residual.

        Returns:
            The normalised rows times the weight, and the total `residual + scale * hidden`, rounded once, or `hidden`.
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
            residual: as in `rms_norm`.
            scale: as there.

        Returns:
            As `rms_norm`.
        """
        ...

    def add_normed(
        self, hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor, scale: float = 1.0
    ) -> Tensor:
        """Adds to the residual what `rms_norm` makes of rows, rounded, times `scale` -> [T, width], rounded again."""
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
            qkv: [T, (H + 2K) * D], queries, keys, values; may be overwritten.
            rotary: [T, 2, R], each row's cosines and its sines, those of the first half negated, so that
                `x * cos + roll(x, R / 2) * sin` rotates the pairs (i, i + R / 2) of a head's first R numbers, R <= D;
                [T, 4, R]: the last two are those of the queries; None: nothing is rotated.
            batch: the step.
            kv_pool: written at `batch.slot_mapping` in this layer; the rest of `batch.fresh_blocks` is cleared.
            layer: index of the layer in the pool.
            shape: the model's heads.
            norms: of queries and of keys, before rotating or after.

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
            batch: the step.
            kv_pool: read only.
            layer: index of the layer in the pool.
            shape: the model's heads.
            sliding_window: as in `plan_attention`, for this layer.
            sinks: [H] float32, a score of each head's beside those of its keys, of which no value comes; None: none.
        """
        ...

    def swap_blocks(self, source_pool: Tensor, destination_pool: Tensor, pairs: BlockPairs) -> None:
        """Copies whole blocks between two pools of one layout (and, on a GPU, two devices), bit for bit.

        Destinations are distinct. Returns when the bytes have arrived.

        Raises:
            ValueError: an id outside its pool, or pools of different layouts.
        """
        ...

    def copy_blocks(self, pool: Tensor, pairs: BlockPairs) -> None:
        """Copies whole blocks within a pool, bit for bit, as if all at once: every source is read before any write.

        Destinations are distinct.

        Raises:
            ValueError: an id outside the pool.
        """
        ...

    def capture(
        self, forward: Callable[[Tensor, AttentionBatch], Tensor], head: PackedLinear | None, sizes: CaptureSizes
    ) -> CapturedStep | None:
        """Records a network's step, to be replayed with other inputs; None: this backend runs its ops one by one.

        Args:
            forward: computes hidden rows [T, hidden_size], normed, from token ids [T] and a batch, by this backend's
                ops alone. Called once. What it refers to (weights, the pool) must live as long as what is returned.
            head: makes logits of the hidden rows; None: another stage does, and this one has no outputs.
            sizes: of the steps to come.
        """
        ...

    def probe(self, linears: Sequence[PackedLinear], shape: AttentionShape) -> bool:
        """Proves on this machine that no row's bits depend on the rows beside it, for every shape that a model uses.

        Where a way of computing fails, the next one of the backend's ladder is taken, for good (`linears` are packed
        anew). Run it before the first step.

        Returns:
            Whether results are batch-invariant.
        """
        ...


def kv_pool_shape(
    num_blocks: int, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int
) -> tuple[int, int, int, int, int, int]:
    """The shape of a KV pool: block by block, each over all layers."""
    check_block_size(block_size)
    return num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim


def check_block_size(block_size: int) -> None:
    """Refuses a block size that attention's splits of 256 keys do not hold a whole number of.

    Raises:
        ValueError: it is none of BLOCK_SIZES.
    """
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")
