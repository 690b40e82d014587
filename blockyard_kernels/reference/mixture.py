"""Mixtures of experts in torch: the reference for the other backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from blockyard_kernels.reference import elementwise
from blockyard_kernels.reference.linear import Method, ReferenceLinear, join_rows
from blockyard_kernels.shapes import LinearSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.mixture.ops import ExpertShape, ExpertWeights, PackedExperts, Router
    from blockyard_kernels.packed import PackedLinear

SWIGLU_FACTOR = 1.702
# Added to the sum of sigmoids by which weights are divided, as in LFM2 and DeepSeek V3.
SMALLEST_SUM = 1e-6


class ReferenceExperts:
    """See `blockyard_kernels.mixture.ops.PackedExperts`."""

    def __init__(self, experts: Iterable[ExpertWeights], shape: ExpertShape, method: Method) -> None:
        self.shape = shape
        self.linears: Sequence[ReferenceLinear] = [
            linear for weights in experts for linear in _pack(weights, shape, method)
        ]

    def expert(self, number: int) -> tuple[ReferenceLinear, ReferenceLinear]:
        return self.linears[2 * number], self.linears[2 * number + 1]


def _pack(weights: ExpertWeights, shape: ExpertShape, method: Method) -> tuple[ReferenceLinear, ReferenceLinear]:
    gate_up = LinearSpec(gated=True, activation=shape.activation)
    down = LinearSpec(leaves=shape.leaves, partial=shape.partial)
    first = ReferenceLinear(join_rows(weights.gate_up), weights.gate_up_bias, method, gate_up)
    # The bias is added after the leaves of all ranks.
    return first, ReferenceLinear(weights.down, weights.down_bias, method, down)


class ReferenceMixtureOps:
    """See `blockyard_kernels.mixture.ops.MixtureOps`."""

    def __init__(self, method: Method, ranks: Callable[[], Ranks]) -> None:
        """`ranks`: returns the ranks that share partial weights."""
        self._method = method
        self._ranks = ranks

    def pack_router(self, weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> PackedLinear:
        wide = None if bias is None else bias.float()
        return ReferenceLinear(weight.float(), wide, self._method)

    def pack_experts(
        self, experts: Iterable[ExpertWeights], shape: ExpertShape, arena: Arena | None = None
    ) -> PackedExperts:
        return ReferenceExperts(experts, shape, self._method)

    def route(self, hidden: Tensor, packed: PackedLinear, router: Router) -> tuple[Tensor, Tensor]:
        return choose(cast("ReferenceLinear", packed).unrounded(hidden), router)

    def experts(self, hidden: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
        held = cast("ReferenceExperts", packed)
        slots = torch.empty(*ids.shape, hidden.shape[1], device=hidden.device)
        rows = slots.view(-1, hidden.shape[1])
        top_k = ids.shape[1]
        for number in ids.unique().tolist():
            first, second = held.expert(number)
            places = (ids.flatten() == number).nonzero().flatten()
            inner = activate(first(hidden[places // top_k]), held.shape)
            rows[places] = second.unrounded(inner).float()
        if held.shape.partial:
            self._ranks().stage.add(slots.view(len(hidden), -1))
            for number in ids.unique().tolist():
                mine = (ids.flatten() == number).nonzero().flatten()
                rows[mine] = held.expert(number)[1].biased(rows[mine])
        total = slots[:, 0] * weights[:, :1]
        for rank in range(1, top_k):
            total = total + slots[:, rank] * weights[:, rank, None]
        return total.to(hidden.dtype)


def choose(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Chooses experts and weights from logits [T, E] float32: see `blockyard_kernels.mixture.ops.MixtureOps.route`."""
    scores = elementwise.logistic(logits) if router.is_sigmoid else logits
    keys = scores if router.choice_bias is None else scores + router.choice_bias
    keys = keys.masked_fill(keys.isnan(), float("inf"))
    ids = torch.sort(keys, dim=1, descending=True, stable=True).indices[:, : router.top_k]
    chosen = scores.gather(1, ids)
    if router.is_sigmoid:
        weights = chosen / (_add_ranks(chosen) + SMALLEST_SUM)[:, None] if router.renormalises else chosen
        return ids.to(torch.int32), weights * router.scale
    largest = chosen[:, :1]
    powers = torch.exp(chosen - largest)
    total = _add_ranks(powers) if router.renormalises else torch.exp(logits - largest).sum(1)
    return ids.to(torch.int32), powers / total[:, None] * router.scale


def _add_ranks(numbers: Tensor) -> Tensor:
    """Adds the numbers of each row [T, k] in order."""
    total = numbers[:, 0]
    for rank in range(1, numbers.shape[1]):
        total = total + numbers[:, rank]
    return total


def activate(gate_up: Tensor, shape: ExpertShape) -> Tensor:
    """Applies the experts' activation to gates and ups [R, 2 * inner] -> [R, inner]: see `ExpertShape`."""
    if not shape.limit:
        return elementwise.activate_and_mul(gate_up, shape.activation)
    gate, up = gate_up.float().chunk(2, dim=1)
    gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit)
    glu = gate / torch.exp(gate * -SWIGLU_FACTOR).add_(1)
    return ((up + 1) * glu).to(gate_up.dtype)
