"""Linear layers on a GPU: weights, the methods of their products, and the choice of a batch-invariant method.

cuBLAS is the fastest method but is not batch-invariant: it takes another kernel for another number of rows. The ladder
lists methods from the fastest to the safest; each is tested on the device with the weight itself until one passes.
Knows nothing of networks and of other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from copy import copy
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockyard_kernels.arena import Arena, keep
from blockyard_kernels.cuda.epilogue import PLAIN, Epilogue, finish
from blockyard_kernels.cuda.gemm import multiply
from blockyard_kernels.cuda.quantized import INT8, MAX_INT8_FEATURES, Format, Quantized, quantize
from blockyard_kernels.invariance import MAX_ROWS, NUM_ROWS, keeps_rows, random_numbers
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# Numbers of ranks that may share a weight's rows.
SHARES = (2, 4, 8)


class Method(StrEnum):
    """The method of a product."""

    LIBRARY = "library"
    """cuBLAS, with any number of rows."""
    PADDED = "padded"
    """cuBLAS, with rows padded to a power of two, at most 512."""
    TILED = "tiled"
    """Our kernel: one order of summation; the tile size depends on the number of rows."""
    UNIFORM = "uniform"
    """Our kernel with the tiles of many rows also for few rows, so that the same instructions multiply all rows."""


@dataclass(frozen=True, slots=True)
class Way:
    method: Method
    min_rows: int = 1
    """Fewer rows are padded to this number; a power of two."""


FAST = Way(Method.LIBRARY)
# Padding few rows costs little, since reading the weight takes most of the time; padding to 256 rows would cost much.
LADDER = (*(Way(Method.PADDED, rows) for rows in (16, 32, 64, 128)), Way(Method.TILED), Way(Method.UNIFORM))


class CudaLinear:
    """A weight [rows, in_features], as it is or in 8 bits (`cuda.quantized`), and an optional bias [rows].

    Only our kernel multiplies weights of several leaves, since a library does not add them as a tree, and 8-bit
    weights, since a library would write unscaled sums. In invariant mode the same holds for partial weights.
    """

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        spec: LinearSpec = PLAIN_LINEAR,
        *,
        eight_bits: Format | None = None,
    ) -> None:
        whole = weight.contiguous() if isinstance(weight, Tensor) else torch.cat(list(weight))
        self.dtype = whole.dtype
        self.in_features = whole.shape[1]
        if eight_bits is INT8 and self.in_features > MAX_INT8_FEATURES:
            raise ValueError(f"in_features must be at most {MAX_INT8_FEATURES} in int8, not {self.in_features}")
        self.out_features = len(whole) // 2 if spec.gated else len(whole)
        self.epilogue = Epilogue(spec.gated, spec.activation)
        self._wide_epilogue = replace(self.epilogue, logits=spec.logits)
        self.is_partial = spec.partial
        self.is_table = not spec.gated and eight_bits is None
        self.leaves = spec.leaves
        self.way = FAST
        made = None if eight_bits is None else quantize(whole, eight_bits, spec.leaves)
        self.weight, self.scales = (whole, None) if made is None else (made.values, made.scales)
        self.layout = f"rows of {str(self.weight.dtype).removeprefix('torch.')}"
        self.layout += "" if made is None else ", a scale for each output and leaf"
        self.bias = bias
        self._eight_bits = eight_bits

    def move_to(self, arena: Arena) -> None:
        self.weight = keep(arena, self.weight)
        self.scales, self.bias = (None if each is None else keep(arena, each) for each in (self.scales, self.bias))

    @property
    def is_gated(self) -> bool:
        return self.epilogue.gated

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (self.weight, self.scales, self.bias) if each is not None)

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the (dequantized) weight [rows, in_features] and of the bias [rows]."""
        bias = None if self.bias is None else self.bias.clone()
        if self.scales is None:
            return self.weight.clone(), bias
        wide = self.weight.float().view(len(self.weight), self.scales.shape[1], -1) * self.scales[:, :, None]
        return wide.view(self.weight.shape), bias

    def takes(self, way: Way) -> bool:
        return way.method is not Method.PADDED or not (self.leaves > 1 or self.is_partial or self.scales is not None)

    def __call__(self, rows: Tensor, *, wide: bool = False, known: Quantized | None = None) -> Tensor:
        """Multiplies rows [R, in_features] of any row stride -> [R, out_features] in the dtype.

        The result is float32 if `wide` or if the weight is partial; a partial weight's result is without the bias, see
        `finished`. `known` holds rows that are already quantized with one leaf; it is used if they are these rows.
        """
        epilogue = self._wide_epilogue if wide else self.epilogue
        wide = wide or self.is_partial
        dtype, bias = torch.float32 if wide else self.dtype, None if self.is_partial else self.bias
        if not self._uses_library:
            return self._own_product(rows, bias, epilogue, dtype=dtype, known=known)
        products = self.library_products(rows, wide=wide)
        is_done = bias is None and epilogue.is_idle
        return products if is_done else finish(products, bias, dtype=dtype, epilogue=epilogue)

    def sums(self, rows: Tensor, known: Quantized | None = None) -> Tensor:
        """Multiplies -> [R, rows of the weight], without bias and epilogue; rounded only if a library rounds."""
        if self._uses_library:
            return self.library_products(rows, wide=self.is_partial)
        return self._own_product(rows, None, PLAIN, dtype=torch.float32, known=known)

    def finished(self, sums: Tensor) -> Tensor:
        """Adds bias and epilogue to `sums` -> [R, out_features]. A partial weight's sums must be those of all ranks.

        The result may be `sums` itself.
        """
        if sums.dtype is self.dtype and self.bias is None and self.epilogue.is_idle:
            return sums
        return finish(sums, self.bias, dtype=self.dtype, epilogue=self.epilogue)

    def own_sums(self, rows: Tensor) -> Tensor:
        """Multiplies with our kernel -> [R, rows of the weight] float32, without the bias."""
        return self._own_product(rows, None, PLAIN, dtype=torch.float32)

    def library_products(self, rows: Tensor, *, wide: bool = False) -> Tensor:
        """Multiplies with cuBLAS -> [R, rows of the weight], without the bias, rounded unless `wide`."""
        if self.way.method is Method.LIBRARY:
            return library_product(rows, self.weight, wide=wide)
        parts = [
            library_product(self._padded(part), self.weight, wide=wide)[: len(part)] for part in rows.split(MAX_ROWS)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def _uses_library(self) -> bool:
        return self.way.method in (Method.LIBRARY, Method.PADDED) and self.leaves == 1 and self.scales is None

    def _own_product(
        self,
        rows: Tensor,
        bias: Tensor | None,
        epilogue: Epilogue,
        *,
        dtype: torch.dtype,
        known: Quantized | None = None,
    ) -> Tensor:
        row_scales = None
        if self._eight_bits is not None and self._eight_bits.quantizes_rows:
            if known is None or known.rows is not rows or self.leaves > 1:
                known = quantize(rows, self._eight_bits, self.leaves)
            rows, row_scales = known.values, known.scales
        return multiply(
            rows,
            self.weight,
            bias,
            leaves=self.leaves,
            epilogue=epilogue,
            dtype=dtype,
            scales=None if self.scales is None else (row_scales, self.scales),
            uniform=self.way.method is Method.UNIFORM,
        )

    def _padded(self, rows: Tensor) -> Tensor:
        """Returns the rows, padded with zero rows to a power of two of at least `way.min_rows`."""
        num_rows = max(self.way.min_rows, 1 << (len(rows) - 1).bit_length())
        if num_rows == len(rows):
            return rows
        padded = rows.new_zeros(num_rows, self.in_features)
        padded[: len(rows)] = rows
        return padded


def library_product(rows: Tensor, weight: Tensor, *, wide: bool) -> Tensor:
    """Multiplies with cuBLAS. The result has the dtype of the rows, or is float32 and unrounded if `wide`."""
    if not wide or rows.dtype is torch.float32:
        return torch.mm(rows, weight.T)
    return torch.mm(rows, weight.T, out_dtype=torch.float32)


def settle(linears: Iterable[CudaLinear]) -> bool:
    """Moves the linears of each shape down the ladder until they are batch-invariant; returns whether all are.

    Linears for which no method passes use the library.
    """
    alike: defaultdict[tuple[object, ...], list[CudaLinear]] = defaultdict(list)
    for linear in linears:
        dtypes = linear.dtype, linear.weight.dtype
        key = *linear.weight.shape, linear.is_gated, linear.is_partial, linear.leaves, dtypes
        alike[key].append(linear)
    settled = [_settle(group) for group in alike.values()]
    return all(settled)


def _settle(group: list[CudaLinear]) -> bool:
    first = group[0]
    for way in filter(first.takes, LADDER):
        first.way = way
        if keeps_bits(first):
            break
    else:
        first.way = FAST
    for other in group[1:]:
        other.way = first.way
    return first.way is not FAST


def keeps_bits(linear: CudaLinear) -> bool:
    """Returns whether an output has the same bits for every row count, and in a shard of the weight's rows.

    Our kernel is compared before rounding, since rounding hides most differences. cuBLAS is compared with both dtypes
    of its results, since it may use another kernel for each.
    """
    rows = random_numbers(NUM_ROWS, linear.in_features, seed=7).to(linear.weight.device, linear.dtype)
    if linear.way.method is not Method.PADDED:
        computes = [CudaLinear.own_sums]
    else:
        # Products of gated weights are never wide.
        widths = (False,) if linear.is_gated else (False, True)
        computes = [partial(CudaLinear.library_products, wide=wide) for wide in widths]
    for compute in computes:
        if not keeps_rows(partial(compute, linear), rows, _no_threads, tries_one_thread=False):
            return False
        whole = compute(linear, rows)
        for shares in SHARES:
            parts = [compute(share, rows) for share in _shares(linear, shares)]
            if parts and not torch.equal(torch.cat(parts, dim=1), whole):
                return False
    return True


def _shares(linear: CudaLinear, count: int) -> list[CudaLinear]:
    """Splits the weight's rows into `count` shards; returns no shards if the rows cannot be divided."""
    num_rows = len(linear.weight)
    if num_rows % (16 * count):
        return []
    length = num_rows // count
    return [_share(linear, slice(first, first + length)) for first in range(0, num_rows, length)]


def _share(linear: CudaLinear, here: slice) -> CudaLinear:
    share = copy(linear)
    share.weight = linear.weight[here]
    share.scales = None if linear.scales is None else linear.scales[here]
    return share


def _no_threads(num_threads: int) -> None:
    """Does nothing: a GPU's results do not depend on host threads."""
