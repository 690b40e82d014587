"""An MLP and a mixture of experts: their weights, and their computation in terms of the op set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard_kernels.lora import LoraRows
    from blockyard_kernels.mixture.ops import PackedExperts, Router
    from blockyard_kernels.ops import Backend
    from blockyard_kernels.packed import PackedLinear
    from worker_service.models.mlp.tensors import ExpertTensors
    from worker_service.models.projections import Projection


@dataclass(frozen=True, slots=True, eq=False)
class MLP:
    gate_up: Projection
    """The first product, which includes the activation."""
    down: Projection

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    @property
    def linears(self) -> Sequence[PackedLinear]:
        return self.gate_up.packed, self.down.packed

    def forward(self, normed: Tensor, backend: Backend, lora: LoraRows | None) -> Tensor:
        inner = backend.linear(normed, self.gate_up.packed, lora=lora)
        return backend.linear(inner, self.down.packed, lora=lora)


@dataclass(frozen=True, slots=True, eq=False)
class MoE:
    """A mixture of experts."""

    router: Projection
    routing: Router
    experts: PackedExperts
    tensors: ExpertTensors
    """The tensors of the experts in the checkpoint."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products that adapters may change: none, since adapters change no experts."""
        return ()

    @property
    def linears(self) -> Sequence[PackedLinear]:
        return (self.router.packed, *self.experts.linears)

    def forward(self, normed: Tensor, backend: Backend, lora: LoraRows | None) -> Tensor:
        assert backend.mixture is not None, "checked when the network was built"
        ids, weights = backend.mixture.route(normed, self.router.packed, self.routing)
        return backend.mixture.experts(normed, ids, weights, self.experts)


Feed = MLP | MoE
