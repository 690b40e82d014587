"""Fused products: of linear layers that read the same rows, and of a gated MLP.

A survey finds layers that read the same rows, and a trial finds what an MLP computes: names alone prove nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockyard_kernels.invariance import random_numbers
from blockyard_kernels.reference.elementwise import activate
from blockyard_kernels.shapes import Activation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from blockyard_kernels.ops import Backend
    from blockyard_kernels.packed import PackedLinear

MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
# The sizes of a small MLP with which the code of a large MLP is tried.
WIDTH, INNER, NUM_ROWS = 8, 24, 5
# Rows of different magnitudes, since some networks clamp large values.
MAGNITUDES = (1e-3, 1.0, 1e2, 1e4)
TOLERANCE = 2e-5


@dataclass(slots=True)
class FusedInputs:
    """Records the groups of linear layers that read the same rows directly one after another in a forward pass."""

    names: Mapping[nn.Module, str]
    groups: list[list[str]] = field(default_factory=list[list[str]])
    last: object = None
    """The value that was read last. It is kept alive, so that no other object gets its address."""

    def note(self, module: nn.Module, given: Sequence[Any]) -> None:
        """Records a call; see `nn.Module.register_forward_pre_hook`."""
        rows = given[0] if given else None
        if rows is None or rows is not self.last:
            self.groups.append([])
        self.last = rows
        self.groups[-1].append(self.names[module])


class TogetherProduct:
    """The product of the same rows with several layers' weights, computed at the first layer's call."""

    def __init__(self, backend: Backend, packed: PackedLinear) -> None:
        self._backend = backend
        self._packed = packed
        self._rows: Tensor | None = None
        self._product: Tensor | None = None

    def compute(self, rows: Tensor, start: int, end: int, *, is_last: bool) -> Tensor:
        """Returns columns [..., start:end] of the product of rows [..., inputs]."""
        if rows is not self._rows or self._product is None:
            flat = rows.reshape(-1, rows.shape[-1])
            product = self._backend.linear(flat, self._packed)
            self._rows, self._product = rows, product.view(*rows.shape[:-1], product.shape[-1])
        part = self._product[..., start:end]
        if is_last:
            self._rows = self._product = None
        return part


class PartOfProduct(nn.Module):
    """One of several layers whose products are computed together."""

    def __init__(self, together: TogetherProduct, place: tuple[int, int], weight: Tensor, *, is_last: bool) -> None:
        """`place`: the start and end of this layer's outputs; `weight`: gives its shape and dtype."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._together = together
        self._place = place
        self._is_last = is_last
        self.__dict__["weight"] = torch.empty_like(weight, device="meta")

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies [..., inputs] -> [..., outputs]."""
        return self._together.compute(rows, *self._place, is_last=self._is_last)


class GatedMlp(nn.Module):
    """`down(activation(gate(rows)) * up(rows))` in two products."""

    def __init__(self, backend: Backend, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self._backend = backend
        self._gate_up = gate_up
        self._down = down

    def forward(self, rows: Tensor) -> Tensor:
        """Computes [..., width]."""
        inner = self._backend.linear(rows.reshape(-1, rows.shape[-1]), self._gate_up)
        return self._backend.linear(inner, self._down).view(rows.shape)


@torch.no_grad()
def find_gated_mlp(module: nn.Module) -> Activation | None:
    """Returns the activation of a module that computes a gated MLP and nothing else; None for other modules.

    It runs the module's code in float32 with small products.
    """
    children: dict[str, Any] = dict(module.named_children())
    parts: list[Any] = [children.get(name) for name in MLP_PARTS]
    others = {name: child for name, child in children.items() if name not in MLP_PARTS}
    if any(type(part) is not nn.Linear for part in parts) or _has_tensors(module, others.values()):
        return None
    small = copy.copy(module)
    gate, up, down = (
        _small(part, inputs, outputs)
        for part, inputs, outputs in zip(parts, (WIDTH, WIDTH, INNER), (INNER, INNER, WIDTH), strict=True)
    )
    small._modules = {**children, "gate_proj": gate, "up_proj": up, "down_proj": down}
    rows = torch.cat([random_numbers(NUM_ROWS, WIDTH, seed=index) * size for index, size in enumerate(MAGNITUDES)])
    try:
        expected = small(rows[None])[0]
    except (RuntimeError, TypeError, AttributeError):
        return None
    for activation in Activation:
        got = down(activate(gate(rows), activation) * up(rows))
        bound = TOLERANCE * expected.abs().amax(-1, keepdim=True)
        if got.shape == expected.shape and bool(((got - expected).abs() <= bound).all()):
            return activation
    return None


def _has_tensors(module: nn.Module, others: Iterable[nn.Module]) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return bool(own) or any(next(other.parameters(), None) is not None for other in others)


def _small(like: Any, in_features: int, out_features: int) -> nn.Linear:
    linear = nn.Linear(in_features, out_features, bias=like.bias is not None)
    for seed, parameter in enumerate(linear.parameters()):
        parameter.copy_(random_numbers(*parameter.shape, seed=in_features + out_features + seed))
    return linear
