"""Products with adapters in Triton: their numbers, which rows they touch, and that a row's bits are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.contract.parallel import Parallel
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.epilogue import PLAIN, Epilogue
from blockyard_kernels.cuda.launch_table import shrink_launch
from blockyard_kernels.cuda.linear import FAST, CudaLinear, Method, Way
from blockyard_kernels.cuda.lora import products
from blockyard_kernels.cuda.lora.products import Factors
from blockyard_kernels.cuda.lora.segments import Segments, most_tiles, sort_rows
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.reference.elementwise import activate
from blockyard_kernels.shapes import Activation, LinearSpec
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES, IS_INTERPRETED, reverse_programs
from worker_service.collectives.gathering import make_silence

if TYPE_CHECKING:
    from torch import Tensor

WIDTHS = (16, 6, 31)
NONE, EMPTY = -1, len(WIDTHS)
NUM_SLOTS, MAX_WIDTH = 5, 33
IN_FEATURES, NUM_ROWS = 96, 50
TILED = Way(Method.TILED)
GATED = Epilogue(gated=True, activation=Activation.SILU)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}
# More rows of one slot than a tile has, single rows, an empty slot, a slot that no row has.
SLOTS = [0, NONE, 2, 2, 1, NONE, EMPTY, 0, *[1] * 19]

for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# To interpret takes seconds, and the order of a sum is that of any dtype.
for_one_dtype = pytest.mark.parametrize("dtype", DTYPES[1:2] if IS_INTERPRETED else DTYPES, ids=str)


class Layer:
    """A weight with slots, the same one without, and the adapters in the first slots."""

    def __init__(self, dtype: torch.dtype, way: Way, *, bias: bool = True, **options: Any) -> None:
        self.dtype = dtype
        self.backend = CudaBackend(DEVICE, invariant=True)
        self.weight = (random(NUM_ROWS, IN_FEATURES, seed=1) * IN_FEATURES**-0.5).to(dtype)
        self.bias = random(NUM_ROWS, dtype=dtype, seed=2) if bias else None
        self.gated, self.activation = bool(options.get("gated")), options.get("activation")
        self.packed, self.plain = (self._pack(way, options) for _ in range(2))
        self.factors = [
            (
                (random(width, IN_FEATURES, seed=10 + width) * IN_FEATURES**-0.5).to(dtype),
                random(NUM_ROWS, width, dtype=dtype, seed=30 + width) * 0.5,
            )
            for width in WIDTHS
        ]
        self.backend.lora.make_room(self.packed, NUM_SLOTS, MAX_WIDTH)
        for slot in range(len(WIDTHS)):
            self.bring(slot, slot)

    def _pack(self, way: Way, options: dict[str, Any]) -> CudaLinear:
        bias = None if self.bias is None else self.bias.to(DEVICE)
        packed = self.backend.pack_linear(self.weight.to(DEVICE), bias, LinearSpec(**options))
        assert isinstance(packed, CudaLinear)
        packed.way = way
        return packed

    def bring(self, slot: int, adapter: int) -> None:
        packed = self.backend.lora.pack(self.packed, *self.factors[adapter])
        assert packed.num_bytes > sum(factor.nbytes for factor in self.factors[adapter])
        self.backend.lora.write(self.packed, slot, packed)

    def compute(self, hidden: Tensor, slots: list[int]) -> Tensor:
        return self.backend.linear(hidden, self.packed, lora=LoraRows(np.array(slots, np.int32)))

    def truth(self, hidden: Tensor, slots: list[int]) -> Tensor:
        """In float64, but for the numbers between the factors, which are rounded."""
        rows = hidden.cpu().double()
        result = rows @ self.weight.double().T
        result += 0 if self.bias is None else self.bias.double()
        for row, slot in enumerate(slots):
            if 0 <= slot < EMPTY:
                inner, outer = self.factors[slot]
                result[row] += (rows[row] @ inner.double().T).to(self.dtype).double() @ outer.double().T
        if not self.gated:
            return result if self.activation is None else activate(result, self.activation)
        gate, up = result.chunk(2, dim=-1)
        return activate(gate, self.activation or Activation.SILU) * up


def hidden_rows(count: int, dtype: torch.dtype) -> Tensor:
    """Rows further apart than they are long."""
    return random(count, IN_FEATURES + 8, dtype=dtype, seed=5).to(DEVICE)[:, 8:]


@for_dtypes
@pytest.mark.parametrize(
    ("way", "options"),
    [
        (FAST, {"bias": False}),
        (FAST, {"gated": True, "activation": Activation.GELU_TANH}),
        (TILED, {"activation": Activation.RELU2}),
        (TILED, {"leaves": 4, "bias": False}),
        (Way(Method.UNIFORM), {"gated": True}),
    ],
    ids=str,
)
def test_rows_get_what_their_adapters_add(dtype: torch.dtype, way: Way, options: dict[str, Any]):
    layer, hidden = Layer(dtype, way, **options), hidden_rows(len(SLOTS), dtype)
    found, truth = layer.compute(hidden, SLOTS), layer.truth(hidden, SLOTS)
    assert found.dtype == dtype
    assert (found.cpu().double() - truth).abs().max() / truth.abs().max() < TOLERANCE[dtype]
    # The adapters are no trifle.
    assert (layer.truth(hidden, [NONE] * len(SLOTS)) - truth).abs().max() > 0.1


@for_one_dtype
@pytest.mark.parametrize("options", [{}, {"leaves": 4, "bias": False}, {"gated": True}], ids=str)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    layer, hidden = Layer(dtype, TILED, **options), hidden_rows(len(SLOTS), dtype)
    whole, base = layer.compute(hidden, SLOTS), layer.backend.linear(hidden, layer.plain)
    without = [row for row, slot in enumerate(SLOTS) if slot in (NONE, EMPTY)]
    assert torch.equal(whole[without].view(torch.uint8), base[without].view(torch.uint8))
    others = [row for row in range(len(SLOTS)) if row not in without]
    assert (whole[others] != base[others]).any(dim=1).all()
    for row in (0, 1, 3, 4, 6, len(SLOTS) - 1):
        assert torch.equal(layer.compute(hidden[row : row + 1], SLOTS[row : row + 1])[0], whole[row])
    assert torch.equal(layer.compute(hidden.flip(0), SLOTS[::-1]).flip(0), whole)
    if IS_INTERPRETED:
        reverse_programs(monkeypatch)
        assert torch.equal(layer.compute(hidden, SLOTS), whole)


@for_one_dtype
def test_8_bit_weights_take_adapters_of_the_models_dtype(dtype: torch.dtype):
    for name in ("int8", "fp8"):
        backend = CudaBackend(DEVICE, quantization=name)
        layer, hidden = Layer(dtype, TILED), hidden_rows(len(SLOTS), dtype)
        layer.backend = backend
        layer.packed, layer.plain = (layer._pack(TILED, {}) for _ in range(2))
        backend.lora.make_room(layer.packed, NUM_SLOTS, MAX_WIDTH)
        for slot in range(len(WIDTHS)):
            layer.bring(slot, slot)
        whole, base = layer.compute(hidden, SLOTS), backend.linear(hidden, layer.plain)
        without = [row for row, slot in enumerate(SLOTS) if slot in (NONE, EMPTY)]
        assert torch.equal(whole[without], base[without])
        added = layer.truth(hidden, SLOTS) - layer.truth(hidden, [NONE] * len(SLOTS))
        error = ((whole.double() - base.double()).cpu() - added).abs().max() / added.abs().max()
        assert error < 4 * TOLERANCE[dtype]


@for_one_dtype
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_come_to_the_bits_of_one(dtype: torch.dtype, ranks: int):
    """Of ranks that all hold the same, since each takes what it has itself for what the others have."""
    share, hidden = Layer(dtype, TILED), hidden_rows(len(SLOTS), dtype)
    share.packed = share._pack(TILED, {"leaves": 8 // ranks, "partial": True})
    whole = Layer(dtype, TILED)
    whole.weight = whole.weight.repeat(1, ranks)
    whole.factors = [(inner.repeat(1, ranks), outer) for inner, outer in whole.factors]
    whole.packed = whole._pack(TILED, {"leaves": 8})
    for layer in (share, whole):
        layer.backend.lora.make_room(layer.packed, NUM_SLOTS, MAX_WIDTH)
        for slot in range(len(WIDTHS)):
            layer.bring(slot, slot)
    share.backend.join(make_silence(Parallel(ranks)))
    assert torch.equal(share.compute(hidden, SLOTS), whole.compute(hidden.repeat(1, ranks), SLOTS))


def test_a_slot_takes_another_adapter():
    layer = Layer(DTYPES[0], TILED)
    hidden = hidden_rows(3, DTYPES[0])
    first, second = layer.compute(hidden, [2] * 3), layer.compute(hidden, [1] * 3)
    # A narrower one: what the wider one leaves behind it does not matter.
    layer.bring(2, 1)
    assert torch.equal(layer.compute(hidden, [2] * 3), second)
    layer.bring(2, 2)
    assert torch.equal(layer.compute(hidden, [2] * 3), first)
    layer.backend.lora.write(layer.packed, 2, None)
    assert torch.equal(layer.compute(hidden, [2] * 3), layer.backend.linear(hidden, layer.plain))


def operands(dtype: torch.dtype, slot_stride: int) -> tuple[Tensor, Factors]:
    """Rows, and adapters of widths 16 and 32 in slots so far apart; of the memory only what is written is there."""
    numbers = 32 * (48 + 40)
    held = torch.empty(slot_stride + numbers, dtype=dtype, device=DEVICE).as_strided((2, numbers), (slot_stride, 1))
    for slot in range(2):
        held[slot] = random(numbers, dtype=dtype, seed=slot).to(DEVICE) * 0.1
    widths = torch.tensor([16, 0, 0, 32], dtype=torch.int32, device=DEVICE)[::3]
    return random(5, 48, dtype=dtype, seed=3).to(DEVICE), Factors(widths, held, 48)


def segments(slots: list[int], num_slots: int, extra_tiles: int = 0) -> Segments:
    found = Segments.of(LoraRows(np.array(slots, np.int32)), num_slots, DEVICE)
    return Segments(found.order, found.bounds, found.num_tiles + extra_tiles)


@for_one_dtype
def test_slots_may_lie_further_apart_than_32_bits_reach(dtype: torch.dtype):
    by_slot = segments([1, 0, 1, NONE, 1], 2)
    results = []
    for stride in (32 * 88, 2**31 + 64):
        rows, factors = operands(dtype, stride)
        inner = products.shrink(rows, factors, by_slot, 1)
        result = torch.zeros(5, 40, dtype=dtype, device=DEVICE)
        products.expand(result, None, inner, factors, by_slot, result, 48, PLAIN)
        results.append(result)
    assert torch.equal(*results)
    assert results[0][[0, 1, 2, 4]].abs().amax(dim=1).gt(0.01).all()


@for_dtypes
def test_only_what_adapters_have_is_read_and_written(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    rows, factors = operands(dtype, 32 * 88)
    # There may be more tiles than rows fill, as in a graph.
    by_slot = segments([1, NONE, 0, NONE, 1], 2, extra_tiles=3)
    rows[[1, 3]] = torch.nan
    plain = torch.Tensor.new_empty

    def new_empty(self: Tensor, *sizes: int, **options: object) -> Tensor:
        return plain(self, *sizes, **options) if len(sizes) == 1 else plain(self, *sizes, **options).fill_(torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    inner = products.shrink(rows, factors, by_slot, 1)
    written = torch.zeros(5, 48, dtype=torch.bool, device=DEVICE)
    written[[0, 4], :32] = written[2, :16] = True
    assert torch.equal(inner.isfinite(), written)
    for gated in (False, True):
        sums = random(7, 40, seed=4).to(DEVICE)
        sums[[2, 4]] = torch.nan
        result = torch.full((7, 20 if gated else 40), torch.inf, dtype=dtype, device=DEVICE)
        products.expand(sums[1:6], None, inner, factors, by_slot, result[1:6], 48, GATED if gated else PLAIN)
        assert result[[1, 3, 5]].isfinite().all()
        assert result[[0, 2, 4, 6]].isinf().all()


def test_rows_are_sorted_and_tiles_are_enough():
    slots = np.array([2, -1, 0, 2, -1, 2], np.int32)
    bounds, order = sort_rows(slots, 4)
    assert bounds.tolist() == [2, 3, 3, 6, 6]
    assert order.tolist() == [1, 4, 2, 0, 3, 5]
    assert segments([0] * 17 + [3], 4).num_tiles == 3
    assert segments([NONE] * 4, 4).num_tiles == 0
    assert [most_tiles(*each) for each in ((1, 8), (64, 2), (8, 256), (2048, 1))] == [1, 5, 8, 128]


def test_steps_along_a_leaf_go_by_its_length_alone():
    assert [shrink_launch(2, features).block_k for features in (4096, 1792, 1376)] == [256, 256, 64]
