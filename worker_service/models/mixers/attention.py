"""Paged attention between two products: its weights, and its computation in terms of the op set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard.model_config.decoder_config import Attention
    from blockyard_kernels.shapes import QueryKeyNorms
    from worker_service.models.projections import Projection
    from worker_service.models.step_context import StepContext


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMixer:
    config: Attention
    qkv: Projection
    norms: QueryKeyNorms | None
    output: Projection
    sinks: Tensor | None = None
    """[heads] float32: see `Backend.paged_attention`."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.output

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors outside of products: the weights of its norms, and its sinks."""
        sinks = () if self.sinks is None else (self.sinks,)
        return (*(self.norms[:2] if self.norms else ()), *sinks)

    def forward(self, normed: Tensor, context: StepContext, index: int) -> Tensor:
        """Computes rows [T, hidden_size]. `index`: the layer's index among this rank's layers."""
        backend, pool, shape, config = context.backend, context.kv_pool, context.shape, self.config
        kv_group, place = context.places[index]
        batch = context.batch.of_group(kv_group)
        rotary = None if config.rotary is None else context.rotaries[config.rotary]
        qkv = backend.linear(normed, self.qkv.packed, lora=context.lora)
        query = backend.rotary_and_cache(qkv, rotary, batch, pool, place, shape, self.norms)
        attended = backend.paged_attention(query, batch, pool, place, shape, config.window, self.sinks)
        if config.gates_output:
            width = shape.num_heads * shape.head_dim
            assert backend.recurrent is not None, "checked when the network was built"
            attended = backend.recurrent.gate(attended, qkv[:, width : 2 * width])
        return backend.linear(attended, self.output.packed, lora=context.lora)
