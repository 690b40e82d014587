"""The ops of mixtures of experts (MoE), documented once for all backends. Shapes: see `blockyard_kernels.ops`.

Further letters: E experts, of which each row uses k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.packed import PackedLinear
    from blockyard_kernels.shapes import Activation


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """The rule by which a row's experts are chosen and weighed."""

    top_k: int
    renormalises: bool
    """Whether the weights are the scores over the sum of the chosen experts' scores; if false, the scores."""
    scale: float = 1.0
    """Factor of the weights."""
    is_sigmoid: bool = False
    """Whether a score is the sigmoid of its logit, and the sum above has 1e-6 added; if false, scores are a softmax."""
    choice_bias: Tensor | None = None
    """[E] float32: added to the scores by which experts are chosen, and not to the weights. Only with sigmoids."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The properties that all experts of a layer share."""

    num_experts: int
    activation: Activation
    """Applied to gates: the first product's result is `activation(gate) * up`."""
    limit: float = 0.0
    """If not 0, the first product's result is `(up + 1) * gate / (1 + exp(-1.702 * gate))` instead, with the gate
    clamped to at most `limit` and the up to [-limit, limit]."""
    leaves: int = 1
    """The leaves of the second product: see `LinearSpec.leaves`."""
    partial: bool = False
    """Whether other ranks hold the rest of the inner features: see `LinearSpec.partial`."""


class ExpertWeights(NamedTuple):
    """The weights of one expert, its biases or None."""

    gate_up: Sequence[Tensor]
    """[2 * inner, width], gates first; its rows in consecutive parts."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[width, inner]."""
    down_bias: Tensor | None


class PackedExperts(Protocol):
    """The experts of a layer in the backend's own layout."""

    shape: ExpertShape

    @property
    def linears(self) -> Sequence[PackedLinear]:
        """The first and the second weight of each expert, expert by expert."""
        ...


class MixtureOps(Protocol):
    """The MoE ops. As with the other ops, a row's bits do not depend on the other rows."""

    def pack_router(self, weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> PackedLinear:
        """Packs the weight [E, width] and bias [E] of a router, which is never quantized."""
        ...

    def pack_experts(
        self, experts: Iterable[ExpertWeights], shape: ExpertShape, arena: Arena | None = None
    ) -> PackedExperts:
        """Packs experts one at a time: each is released before `experts` is asked for the next one.

        The packed experts lie one after another in one part of the arena. See `Backend.pack_linear`.
        """
        ...

    def route(self, hidden: Tensor, packed: PackedLinear, router: Router) -> tuple[Tensor, Tensor]:
        """Chooses the experts of rows [T, width].

        Logits are computed in float32. The largest are chosen or, with a choice bias, the largest sums of score and
        bias; on ties the lowest id comes first. NaN counts as the largest number.

        Returns:
            Ids [T, k] int32 and their weights [T, k] float32, the largest first.
        """
        ...

    def experts(self, hidden: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
        """Computes for each row [T, width] the weighted sum of its experts' outputs -> [T, width].

        The second products, their biases, the weights and the sum, which is added in the order of `ids`, are float32;
        the sum is rounded once.
        """
        ...
