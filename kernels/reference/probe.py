"""The proof, made at start on this machine, that a row's bits do not depend on the rows beside it.

Libraries choose other kernels on other processors, so what was measured on one machine is checked on each. All rows go
through every row count: in bfloat16 a sum that was made in another order shows in one output of some thousands only.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from kernels.reference.linear import LADDER, ReferenceLinear
from kernels.reference.planning import PREFILL_TILE_ROWS, SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_ROWS = 96
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 27, 32, 64)
ROW_MULTIPLES = (4, 8, 16)


def settle_linears(linears: Iterable[ReferenceLinear]) -> bool:
    """Steps the linears of each shape down the ladder until they are exact; tells whether all shapes got there."""
    alike: defaultdict[tuple[object, ...], list[ReferenceLinear]] = defaultdict(list)
    for linear in linears:
        alike[linear.out_features, linear.in_features, linear.dtype, linear.method].append(linear)
    settled = [_settle(group) for group in alike.values()]
    return all(settled)


def _settle(group: list[ReferenceLinear]) -> bool:
    first = group[0]
    fastest = first.method
    for method in LADDER[LADDER.index(fastest) :]:
        if first.method is not method:
            first.pack(method)
        if rows_are_independent(first):
            for other in group[1:]:
                if other.method is not method:
                    other.pack(method)
            return True
    first.pack(fastest)
    return False


def rows_are_independent(linear: ReferenceLinear) -> bool:
    """Tells whether the rows of a product are the same bits for every row count."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(NUM_ROWS, linear.in_features, generator=generator).to(linear.dtype)
    expected = linear(rows)
    return all(
        torch.equal(torch.cat([linear(part.clone()) for part in rows.split(count)]), expected) for count in ROW_COUNTS
    )


def find_row_multiple(head_dim: int) -> int | None:
    """Finds what attention's tiles must be padded to a multiple of, or None where nothing helps."""
    return next((multiple for multiple in ROW_MULTIPLES if _tiles_are_independent(head_dim, multiple)), None)


def _tiles_are_independent(head_dim: int, multiple: int) -> bool:
    """Tells whether the two products of a split are the same bits for every number of rows and of pairs."""
    generator = torch.Generator().manual_seed(8)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    most = max(PREFILL_TILE_ROWS, 3 * multiple)
    scores = (random(6, most, head_dim), random(6, SPLIT, head_dim).transpose(1, 2))
    products = (random(6, most, SPLIT).abs(), random(6, SPLIT, head_dim))
    row_counts = sorted({multiple, 2 * multiple, 3 * multiple, 16, 32, most})
    for left, right in (scores, products):
        expected = torch.bmm(left, right)
        for num_rows in row_counts:
            for num_pairs in (1, 2, 5):
                got = torch.bmm(left[:num_pairs, :num_rows].contiguous(), right[:num_pairs])
                if not torch.equal(got, expected[:num_pairs, :num_rows]):
                    return False
    return True
