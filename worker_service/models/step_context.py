"""The inputs of one step that all layers of a network share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard.model_config.state import StatePlan
    from blockyard_kernels.lora import LoraRows
    from blockyard_kernels.ops import AttentionBatch, Backend
    from blockyard_kernels.shapes import AttentionShape


@dataclass(frozen=True, slots=True)
class StepContext:
    backend: Backend
    batch: AttentionBatch
    kv_pool: Tensor
    rotaries: Sequence[Tensor]
    """[T, 2, rotated numbers] for each rotary embedding: cosines and sines of each row's position."""
    shape: AttentionShape
    places: Sequence[tuple[int, int]]
    """The KV group of each layer, and the layer's index within that group."""

    states: StatePlan | None = None
    """Where the states of recurrent layers lie; None: no layer of this rank has one."""

    @property
    def lora(self) -> LoraRows | None:
        return self.batch.lora
