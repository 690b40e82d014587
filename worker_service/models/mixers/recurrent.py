"""A recurrence between two products: its weights, and its computation in terms of the op set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.recurrent.ops import RecurrentShape, RecurrentWeights
    from worker_service.models.projections import Projection
    from worker_service.models.step_context import StepContext


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentMixer:
    shape: RecurrentShape
    inputs: Projection
    weights: RecurrentWeights
    output: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs, self.output

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors outside of products."""
        return tuple(tensor for tensor in self.weights if tensor is not None)

    def forward(self, normed: Tensor, context: StepContext, index: int) -> Tensor:
        """Computes rows [T, hidden_size]; `index` as for attention."""
        backend, recurrent = context.backend, context.backend.recurrent
        assert recurrent is not None and context.states is not None, "checked when the network was built"
        rows = backend.linear(normed, self.inputs.packed, lora=context.lora)
        places = context.states.places[index]
        mixed = recurrent.mix(rows, self.weights, context.batch, context.kv_pool, places, self.shape)
        return backend.linear(mixed, self.output.packed, lora=context.lora)
