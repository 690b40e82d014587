"""Holds the reference to its promises on the processor that it runs on, by other rows than its probe tries.

    python -m tests.kit.kernels.promises [number of threads]

writes a `tests.kit.kernels.processors.Report` as JSON. One thread does not wait on a
busy machine.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.reference.backend import ReferenceBackend
from blockyard_kernels.reference.linear import LADDER, ReferenceLinear
from blockyard_kernels.reference.probe import rows_are_independent
from blockyard_kernels.shapes import AttentionShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

BLOCK_SIZE = 32
NUM_BLOCKS = 19
LENGTH = 600
SHAPES = [
    AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    for num_heads, num_kv_heads, head_dim in ((2, 2, 96), (3, 1, 80), (4, 1, 128), (2, 2, 256), (5, 1, 20), (4, 2, 64))
]
PRODUCTS = ((200, 320), (96, 1536))


def broken_products() -> Iterator[tuple[str, bool]]:
    """Names each product whose rows are promised, and tells whether some row broke it."""
    for method in LADDER:
        for dtype in (torch.float32, torch.bfloat16):
            for out_features, in_features in PRODUCTS:
                weight = torch.randn(out_features, in_features, dtype=dtype) * in_features**-0.5
                linear = ReferenceLinear(weight, None, method)
                if rows_are_independent(linear):
                    rows = torch.randn(700, in_features, dtype=dtype)
                    pieces = rows.split([1, 6, 46, 77, 570])
                    kept = torch.equal(torch.cat([linear(piece) for piece in pieces]), linear(rows))
                    yield f"{method} {dtype} {out_features}x{in_features}", not kept


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention over one sequence."""

    backend: ReferenceBackend
    shape: AttentionShape
    pool: Tensor
    query: Tensor

    @classmethod
    def random(cls, shape: AttentionShape) -> Attention:
        """Makes one of random keys, values and queries."""
        pool_shape = kv_pool_shape(NUM_BLOCKS, 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        query = torch.randn(LENGTH, shape.num_heads, shape.head_dim)
        return cls(ReferenceBackend(torch.device("cpu")), shape, torch.randn(pool_shape), query)

    def compute(self, pieces: list[tuple[int, int]]) -> Tensor:
        """Computes rows [start, end) of each piece."""
        counts, ends = [end - start for start, end in pieces], [end for _, end in pieces]
        batch = self.backend.plan_attention(counts, ends, [list(range(NUM_BLOCKS))] * len(pieces), BLOCK_SIZE)
        rows = torch.cat([self.query[start:end] for start, end in pieces])
        return self.backend.paged_attention(rows, batch, self.pool, 0, self.shape)

    def keeps(self, pieces: list[tuple[int, int]]) -> bool:
        """Returns whether pieces of the whole, and some of them alone, are the same bits as the whole."""
        whole = self.compute([(0, LENGTH)])
        alone = [torch.equal(self.compute([piece]), whole[slice(*piece)]) for piece in pieces[::6]]
        return torch.equal(self.compute(pieces), whole) and all(alone)


def broken_attentions() -> Iterator[tuple[str, bool]]:
    """Does so for attention: one sequence in many pieces, some of them alone."""
    cuts = sorted(random.Random(0).sample(range(1, LENGTH), 60))
    pieces = list(zip([0, *cuts], [*cuts, LENGTH], strict=True))
    for shape in SHAPES:
        attention = Attention.random(shape)
        if attention.backend.probe([], shape):
            yield f"attention {shape}", not attention.keeps(pieces)


def main() -> None:
    """The program."""
    torch.manual_seed(1)
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    promised = [*broken_products(), *broken_attentions()]
    json.dump(
        {"num_promised": len(promised), "broken": [name for name, is_broken in promised if is_broken]}, sys.stdout
    )


if __name__ == "__main__":
    main()
