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
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors outside of products: none."""
        return ()

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
    stored: ExpertTensors
    """The tensors of the experts in the checkpoint."""
    shared: MLP | None = None
    """An MLP whose result is added to every row."""
    shared_gate: Projection | None = None
    """A product with one output, by whose sigmoid the shared MLP's result is multiplied."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products that adapters may change: those of the shared MLP, since adapters change no experts."""
        return self.shared.projections if self.shared is not None else ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors outside of products."""
        return () if self.routing.choice_bias is None else (self.routing.choice_bias,)

    @property
    def linears(self) -> Sequence[PackedLinear]:
        gate = () if self.shared_gate is None else (self.shared_gate.packed,)
        shared = () if self.shared is None else self.shared.linears
        return (self.router.packed, *self.experts.linears, *shared, *gate)

    def forward(self, normed: Tensor, backend: Backend, lora: LoraRows | None) -> Tensor:
        assert backend.mixture is not None, "checked when the network was built"
        ids, weights = backend.mixture.route(normed, self.router.packed, self.routing)
        rows = backend.mixture.experts(normed, ids, weights, self.experts)
        if self.shared is None:
            return rows
        shared = self.shared.forward(normed, backend, lora)
        if self.shared_gate is not None:
            assert backend.recurrent is not None, "checked when the network was built"
            shared = backend.recurrent.gate(shared, backend.linear(normed, self.shared_gate.packed))
        return backend.add(shared, rows)


Feed = MLP | MoE
