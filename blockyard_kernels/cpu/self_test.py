"""Self-test of a library when it is loaded: compares small products with the same arithmetic in scalar C++.

An instruction may compute differently on a processor that was never tested. A library may know several arithmetics for
one dtype; the arithmetic that matches this processor is part of a backend's identity. If none matches, the backend's
`probe` must test batch invariance.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.cpu.packed import ELEMENT_TYPES
from blockyard_kernels.packed import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from blockyard_kernels.cpu.library import Library

    # (rows [R, K], weight [N, K], leaves) -> [R, N] float32.
    Product = Callable[[Tensor, Tensor, int], Tensor]
    GroupedProduct = Callable[[Tensor, QuantizedWeight, int], Tensor]


class Arithmetic(IntEnum):
    """The order and the rounding of a sum of products: see csrc/arithmetic.h."""

    FUSED = 0
    PAIRS_ODD_FIRST = 1
    PAIRS_EVEN_FIRST = 2
    TILES = 3
    WHOLE_NUMBERS = 4


PAIRS = (Arithmetic.PAIRS_ODD_FIRST, Arithmetic.PAIRS_EVEN_FIRST)
_OF_BFLOAT16 = {"amx": (Arithmetic.TILES,), "amx_emulated": (Arithmetic.TILES,), "avx512_bf16": PAIRS}
# Shapes with whole and with partial tiles: (rows, inner dimension, outputs, leaves).
SHAPES = (
    (1, 896, 48, 1),
    (1, 512, 32, 8),
    (7, 62, 33, 1),
    (13, 96, 64, 2),
    (40, 160, 32, 1),
    (67, 320, 64, 4),
)


class SpelledProduct(ctypes.Structure):
    """A product to compute one number at a time: see csrc/arithmetic.h."""

    _fields_ = (
        ("arithmetic", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("out_features", ctypes.c_int64),
        ("leaves", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A test product whose numbers distinguish arithmetics: of all magnitudes, and some that may be flushed to zero."""

    rows: Tensor
    weight: Tensor
    leaves: int

    @classmethod
    def random(cls, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Trial:
        """Makes the product of a shape (rows, inner dimension, outputs, leaves), with the same numbers every time."""
        num_rows, in_features, out_features, leaves = shape
        generator = torch.Generator().manual_seed(in_features)

        def numbers(count: int) -> Tensor:
            sizes = torch.randint(-12, 4, (count, in_features), generator=generator)
            values = torch.ldexp(torch.randn(count, in_features, generator=generator), sizes)
            # The last of several rows has products near the smallest float32 number, and below it.
            if count > 1:
                values[-1] *= 2.0**-62
                values[-1, ::7] = 2.0**-130
            return values

        rows, weight = numbers(num_rows), numbers(out_features)
        # A sum below the smallest normal number, which only rounding as a denormal would raise to that number.
        rows[-1, :4] = torch.tensor([2.0**-63, 0, 1.5 * 2.0**-75, 0])
        weight[-1, :4] = torch.tensor([2.0**-63, 0, -(2.0**-76), 0])
        return cls(rows.to(dtype), weight.to(dtype), leaves)

    def spell_out(self, library: Library, arithmetic: Arithmetic) -> Tensor:
        """Computes the product one number at a time -> [R, N] float32."""
        output = torch.empty(len(self.rows), len(self.weight))
        product = SpelledProduct(
            arithmetic,
            ELEMENT_TYPES[self.rows.dtype],
            *self.rows.shape,
            len(self.weight),
            self.leaves,
            self.rows.data_ptr(),
            self.weight.data_ptr(),
            output.data_ptr(),
        )
        library.spell_out(product)
        return output


def candidates(instruction_set: str, dtype: torch.dtype, quantization: str) -> Sequence[Arithmetic]:
    """Lists the arithmetics that a library may have for products of a dtype, quantized or not."""
    if quantization != "none":
        return (Arithmetic.WHOLE_NUMBERS,)
    bfloat16 = _OF_BFLOAT16.get(instruction_set, (Arithmetic.FUSED,))
    return bfloat16 if dtype == torch.bfloat16 else (Arithmetic.FUSED,)


# Test shapes: (rows, groups, inputs of a group, outputs, leaves).
GROUPED_SHAPES = ((1, 6, 32, 48, 1), (7, 4, 64, 33, 4), (13, 2, 128, 64, 1))


def knows_groups(product: GroupedProduct, dtype: torch.dtype) -> bool:
    """Returns whether products with 4-bit weights have, on this processor, the bits that csrc/int4.h defines.

    torch computes the expected bits: integer sums are exact in float64, and elementwise ops round each result once.
    """
    generator = torch.Generator().manual_seed(4)
    for num_rows, num_groups, group, num_outputs, leaves in GROUPED_SHAPES:
        rows = torch.randn(num_rows, num_groups * group, generator=generator).to(dtype)
        levels, zeros = (
            torch.randint(0, 16, (num_outputs, width), generator=generator, dtype=torch.uint8)
            for width in (num_groups * group, num_groups)
        )
        weight = QuantizedWeight(dtype, levels, torch.rand(num_outputs, num_groups, generator=generator), zeros)
        if not torch.equal(product(rows, weight, leaves), _spell_groups(rows.float(), weight, leaves)):
            return False
    return True


def _spell_groups(rows: Tensor, weight: QuantizedWeight, leaves: int) -> Tensor:
    assert weight.zeros is not None
    shifted = weight.levels.double() - weight.zeros.double().repeat_interleave(weight.group, 1)
    sums = [torch.zeros(len(rows), weight.num_rows) for _ in range(leaves)]
    num_groups = weight.scales.shape[1]
    for index in range(num_groups):
        columns = slice(index * weight.group, (index + 1) * weight.group)
        largest = rows[:, columns].abs().amax(1, keepdim=True)
        whole = (rows[:, columns] * (127.0 / largest)).round()
        exact = (whole.double() @ shifted[:, columns].T).float()
        leaf = index * leaves // num_groups
        sums[leaf] = sums[leaf] + exact * (weight.scales[:, index] * (largest / 127.0))
    while len(sums) > 1:
        sums = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def find_arithmetic(
    library: Library, product: Product, dtype: torch.dtype, arithmetics: Sequence[Arithmetic]
) -> Arithmetic | None:
    """Returns the arithmetic whose bits a library's products have on this processor, or None if none matches."""
    trials = [Trial.random(shape, dtype) for shape in SHAPES]
    results = [product(trial.rows, trial.weight, trial.leaves) for trial in trials]
    for arithmetic in arithmetics:
        pairs = zip(trials, results, strict=True)
        if all(torch.equal(trial.spell_out(library, arithmetic), result) for trial, result in pairs):
            return arithmetic
    return None
