"""Products with LoRA adapters: near what `blockyard_kernels.lora` defines, and row by row the same bits anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor

from blockyard_kernels.cpu.backend import CpuBackend
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.shapes import Activation, AttentionShape, LinearSpec
from tests.kernels.test_shares import KERNELS
from tests.kit.kernels.backends import BEST, Kernels, build_kernels
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.ranks import new_backend

if TYPE_CHECKING:
    from blockyard_kernels.ops import Backend, PackedLinear

WIDTHS = (16, 6, 31)
NUM_SLOTS, MAX_WIDTH = 4, 32
NONE = -1
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Adapter:
    """Two factors of a weight."""

    shrink: Tensor
    expand: Tensor


class Layer:
    """A weight with slots, of which the last is empty, and the adapters in the others."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        *,
        gated: bool,
        leaves: int,
        bias: bool = True,
        activation: Activation | None = None,
    ) -> None:
        self.backend, self.dtype, self.gated, self.activation = backend, dtype, gated, activation
        self.in_features, rows = 96, 136
        self.weight = (random(rows, self.in_features, seed=1) * self.in_features**-0.5).to(dtype)
        self.bias = random(rows, seed=2).to(dtype) if bias else None
        self.packed, self.plain = (
            backend.pack_linear(
                self.weight.clone(), self.bias, LinearSpec(gated=gated, leaves=leaves, activation=activation)
            )
            for _ in range(2)
        )
        assert backend.lora is not None
        backend.lora.make_room(self.packed, NUM_SLOTS, MAX_WIDTH)
        self.adapters = [
            Adapter(
                (random(width, self.in_features, seed=10 + width) * self.in_features**-0.5).to(dtype),
                random(rows, width, seed=30 + width).to(dtype) * 0.5,
            )
            for width in WIDTHS
        ]
        for slot, adapter in enumerate(self.adapters):
            packed = backend.lora.pack(self.packed, adapter.shrink, adapter.expand)
            assert packed.num_bytes > 0
            backend.lora.write(self.packed, slot, packed)

    def hidden(self, num_rows: int) -> Tensor:
        """Rows as an op before gives them."""
        return random(num_rows, self.in_features, seed=5).to(self.dtype)

    def compute(self, hidden: Tensor, slots: list[int]) -> Tensor:
        """The products of rows with adapters."""
        return self.backend.linear(hidden, self.packed, lora=LoraRows(np.array(slots, np.int32)))

    def truth(self, hidden: Tensor, slots: list[int]) -> Tensor:
        """The same in float64, but for the numbers between the factors, which are rounded."""
        result = hidden.double() @ self.weight.double().T
        result += 0 if self.bias is None else self.bias.double()
        for row, slot in enumerate(slots):
            if 0 <= slot < len(self.adapters):
                adapter = self.adapters[slot]
                inner = (hidden[row].double() @ adapter.shrink.double().T).to(self.dtype).double()
                result[row] += inner @ adapter.expand.double().T
        if not self.gated:
            return result if self.activation is None else result.relu()
        gate, up = result.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def settled(layer: Layer) -> Layer:
    """Has the backend choose how to compute exactly."""
    linears: list[PackedLinear] = [layer.packed, layer.plain]
    assert layer.backend.probe(linears, AttentionShape(2, 2, 16, 0.25))
    for slot, adapter in enumerate(layer.adapters):
        assert layer.backend.lora is not None
        layer.backend.lora.write(
            layer.packed, slot, layer.backend.lora.pack(layer.packed, adapter.shrink, adapter.expand)
        )
    return layer


@pytest.fixture(params=KERNELS, ids=str, scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    build_kernels()
    return request.param


@pytest.mark.parametrize(
    ("gated", "leaves", "activation"),
    [(False, 1, None), (False, 4, None), (True, 1, None), (False, 1, Activation.RELU)],
)
def test_rows_get_what_their_adapters_add(kernels: Kernels, gated: bool, leaves: int, activation: Activation | None):
    layer = Layer(new_backend(kernels), kernels.dtype, gated=gated, leaves=leaves, activation=activation)
    slots = [0, NONE, 2, 2, 1, NONE, 3, 0] * 3
    hidden = layer.hidden(len(slots))
    found, truth = layer.compute(hidden, slots), layer.truth(hidden, slots)
    assert found.dtype == kernels.dtype
    error = (found.double() - truth).abs().max() / truth.abs().max()
    assert error < TOLERANCE[kernels.dtype]
    # The adapters are no trifle.
    assert (layer.truth(hidden, [NONE] * len(slots)) - truth).abs().max() > 0.1


@pytest.mark.parametrize(("gated", "leaves"), [(False, 1), (False, 4), (True, 1)])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(kernels: Kernels, gated: bool, leaves: int):
    if kernels.is_reference and (gated, leaves) != (False, 4):
        # Its probe takes seconds, and leaves are what adapters add to it.
        return
    layer = settled(Layer(new_backend(kernels), kernels.dtype, gated=gated, leaves=leaves))
    # Long runs too, which are cut.
    slots = [0, NONE, 2, 2, 1, NONE, 3, 0, 0, *[1] * 200, NONE, *[2] * 13]
    hidden = layer.hidden(len(slots))
    whole = layer.compute(hidden, slots)
    for row in (*range(10), 100, 208, 209, len(slots) - 1):
        assert torch.equal(layer.compute(hidden[row : row + 1], slots[row : row + 1])[0], whole[row])
    base = layer.backend.linear(hidden, layer.plain)
    without = [row for row, slot in enumerate(slots) if slot in (NONE, 3)]
    assert torch.equal(whole[without], base[without])
    for_all = [row for row in range(len(slots)) if row not in without]
    assert (whole[for_all] != base[for_all]).any(dim=1).all()


def test_int8_weights_take_adapters_of_the_models_dtype():
    build_kernels()
    layer = Layer(CpuBackend(torch.bfloat16, BEST, "int8"), torch.bfloat16, gated=False, leaves=1)
    slots = [0, NONE, 2, 1]
    hidden = layer.hidden(len(slots))
    whole = layer.compute(hidden, slots)
    base = layer.backend.linear(hidden, layer.plain)
    assert torch.equal(whole[1], base[1])
    added = layer.truth(hidden, slots) - layer.truth(hidden, [NONE] * 4)
    error = (whole.double() - base.double() - added).abs().max() / added.abs().max()
    assert error < 3e-2


def test_a_slot_takes_another_adapter(kernels: Kernels):
    layer = Layer(new_backend(kernels), kernels.dtype, gated=False, leaves=1)
    hidden = layer.hidden(3)
    first, second = layer.compute(hidden, [0] * 3), layer.compute(hidden, [1] * 3)
    ops, other = layer.backend.lora, layer.adapters[1]
    assert ops is not None
    ops.write(layer.packed, 0, ops.pack(layer.packed, other.shrink, other.expand))
    assert torch.equal(layer.compute(hidden, [0] * 3), second)
    ops.write(layer.packed, 0, None)
    assert torch.equal(layer.compute(hidden, [0] * 3), layer.backend.linear(hidden, layer.plain))
    assert not torch.equal(first, second)
