"""Mixtures of experts: what networks may ask of them, documented once. As `kernels.ops`, whose letters it uses.

Letters beside those: E experts, k of which a row goes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from kernels.arena import Arena
    from kernels.packed import PackedLinear
    from kernels.shapes import Activation


@dataclass(frozen=True, slots=True)
class Router:
    """The rule by which a row's experts are chosen and weighed."""

    top_k: int
    renormalises: bool
    """Whether the weights are the softmax of the chosen logits alone; else of the logits of all experts."""
    scale: float = 1.0
    """Factor of the weights."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The properties that all experts of a layer share."""

    num_experts: int
    activation: Activation
    """Applied to gates: the first product's result is `activation(gate) * up`."""
    limit: float = 0.0
    """If not 0, it gives `(up + 1) * gate / (1 + exp(-1.702 * gate))` instead, of a gate that is at most the limit and
    an up within it on both sides."""
    leaves: int = 1
    """Of the second product: see `LinearSpec`."""
    partial: bool = False
    """Whether the inner features are this rank's: see `LinearSpec`."""


class ExpertWeights(NamedTuple):
    """The weights of one expert, its biases or None."""

    gate_up: Sequence[Tensor]
    """[2 * inner, width], gates first, in parts one after another."""
    gate_up_bias: Tensor | None
    down: Tensor
    """[width, inner]."""
    down_bias: Tensor | None


class PackedExperts(Protocol):
    """The experts of a layer in the backend's own layout."""

    shape: ExpertShape

    @property
    def linears(self) -> Sequence[PackedLinear]:
        """Of each expert the first product and the second, expert by expert."""
        ...


class MixtureOps(Protocol):
    """The ops of mixtures. A row's results are the same bits whatever stands beside it, as those of other ops."""

    def pack_router(self, weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> PackedLinear:
        """Packs the weight [E, width] and bias [E] of a router, whatever the quantization of other weights."""
        ...

    def pack_experts(
        self, experts: Iterable[ExpertWeights], shape: ExpertShape, arena: Arena | None = None
    ) -> PackedExperts:
        """Packs experts one after another: each is let go of before the next one is asked for.

        What is held of them follows one another in one part of the arena. See `Backend.pack_linear`.
        """
        ...

    def route(self, hidden: Tensor, packed: PackedLinear, router: Router) -> tuple[Tensor, Tensor]:
        """Chooses the experts of rows [T, width].

        Logits are made in float32; the largest are chosen, of equal ones the lowest id first, and what is no number
        before all others.

        Returns:
            Ids [T, k] int32 and their weights [T, k] float32, the largest first.
        """
        ...

    def experts(self, hidden: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
        """Computes for each row [T, width] the sum of what its experts make of it, times their weights -> [T, width].

        Second products and their biases, weights and the sum, which goes in the order of the ids, are in float32,
        rounded once.
        """
        ...
