"""One decoder layer against the op set: attention and a gated MLP, each behind a norm. Knows no file formats.

Every product goes through `Backend.linear` and `Backend.paged_attention`; nothing here multiplies matrices itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.lora import LoraRows
    from kernels.ops import AttentionBatch, AttentionShape, Backend, PackedLinear


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all layers of one step read."""

    backend: Backend
    batch: AttentionBatch
    kv_pool: Tensor
    rotary: Tensor
    """[T, 2, head_dim]: cosines and sines of each row's position."""
    shape: AttentionShape
    norm_epsilon: float

    @property
    def lora(self) -> LoraRows | None:
        """The rows that have an adapter."""
        return self.batch.lora


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, and its place in the pool."""

    index: int
    sliding_window: int | None
    input_norm: Tensor
    qkv: PackedLinear
    qk_norms: tuple[Tensor, Tensor, float] | None
    """Weights [head_dim] of the norms of queries and keys, and their epsilon."""
    output: PackedLinear
    post_attention_norm: Tensor
    gate_up: PackedLinear
    """Gated: it gives the activated rows."""
    down: PackedLinear

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """The layer's products."""
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor, ...]:
        """The weights of the layer's norms."""
        return self.input_norm, self.post_attention_norm, *(self.qk_norms[:2] if self.qk_norms else ())

    def forward(self, hidden: Tensor, residual: Tensor | None, context: StepContext) -> tuple[Tensor, Tensor]:
        """Computes a layer: rows [T, hidden_size] and what is still to be added to them -> the same of its output."""
        backend, epsilon = context.backend, context.norm_epsilon
        normed, residual = backend.rms_norm(hidden, self.input_norm, epsilon, residual)
        attended = self._attend(normed, context)
        normed, residual = backend.rms_norm(attended, self.post_attention_norm, epsilon, residual)
        inner = backend.linear(normed, self.gate_up, lora=context.lora)
        return backend.linear(inner, self.down, lora=context.lora), residual

    def _attend(self, normed: Tensor, context: StepContext) -> Tensor:
        backend, batch, pool, shape = context.backend, context.batch, context.kv_pool, context.shape
        qkv = backend.linear(normed, self.qkv, lora=context.lora)
        query = backend.rotary_and_cache(qkv, context.rotary, batch, pool, self.index, shape, self.qk_norms)
        attended = backend.paged_attention(query, batch, pool, self.index, shape, self.sliding_window)
        return backend.linear(attended, self.output, lora=context.lora)
