"""The op set as one would write it first: F.linear, fused attention for each sequence, torch's own silu.

Its products depend on the number of rows on every processor, not only where torch's do.
The negative control of exactness: what passes with this backend proves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from blockyard_kernels.packed import QuantizedWeight
from blockyard_kernels.reference.backend import ReferenceBackend
from blockyard_kernels.reference.linear import Method, join_rows
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec
from tests.kit.kernels.row_dependent import CountedLinear

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.ops import AttentionBatch, PackedLinear
    from blockyard_kernels.packed import WeightRows
    from blockyard_kernels.shapes import AttentionShape


class PlainBackend(ReferenceBackend):
    """Correct, and not exact."""

    name = "plain"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def pack_linear(
        self,
        weight: WeightRows,
        bias: Tensor | None = None,
        spec: LinearSpec = PLAIN_LINEAR,
        arena: Arena | None = None,
    ) -> PackedLinear:
        """Keeps the weight as it is."""
        assert not isinstance(weight, QuantizedWeight)
        return CountedLinear(join_rows(weight), bias, Method.PLAIN, LinearSpec(gated=spec.gated, leaves=spec.leaves))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Uses torch's own activation."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

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
        """Calls the fused attention once for each sequence."""
        results: list[Tensor] = []
        first = 0
        for num_new, length, table in zip(
            batch.num_new_tokens.tolist(), batch.seq_lens.tolist(), cast("Any", batch.block_tables), strict=True
        ):
            block_ids = torch.from_numpy(table[: -(-length // batch.block_size)])
            # [blocks, 2, K, block_size, D] -> [2, K, keys, D]
            cached = kv_pool[block_ids, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            distance = torch.arange(length - num_new, length)[:, None] - torch.arange(length)
            seen = (distance >= 0) & (distance < (sliding_window or length))
            rows = query[first : first + num_new].transpose(0, 1)
            attended = functional.scaled_dot_product_attention(
                rows[None], cached[None, 0], cached[None, 1], attn_mask=seen, scale=shape.scale, enable_gqa=True
            )
            results.append(attended[0].transpose(0, 1).flatten(1))
            first += num_new
        return torch.cat(results)
