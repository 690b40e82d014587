"""What the ranks of a group do together, over threads and over gloo: values, bits, and the order of sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.model_config.parallel_sizes import MAX_LEAVES
from blockyard_kernels.shapes import add_leaves
from tests.unit.worker_service.collectives.ranks import all_ranks, gloo_groups, make_collectives
from worker_service.collectives.gathering import SilentCollectives

if TYPE_CHECKING:
    from torch import Tensor

TRANSPORTS = ("threads", "gloo")
SIZES = (1, 2, 4, 8)


def leaves(num_leaves: int, seed: int = 0) -> Tensor:
    """Partial sums [num_leaves, 5, 33] of very different sizes, so that each order of adding rounds otherwise."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(num_leaves, 5, 33, generator=generator)
    return numbers * 2.0 ** torch.randint(-12, 12, numbers.shape, generator=generator)


def test_the_tree_is_the_one_that_is_documented() -> None:
    p = leaves(8)
    expected = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]))
    assert torch.equal(add_leaves(list(p)), expected)
    assert not torch.equal(expected, p.sum(0)), "the leaves cannot tell one order from another"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", SIZES)
def test_a_sum_has_the_same_bits_for_any_number_of_ranks_and_leaves(transport: str, size: int) -> None:
    ranks = make_collectives(transport, size)
    num_leaves = size
    while num_leaves <= MAX_LEAVES:
        parts = leaves(num_leaves, seed=num_leaves)
        per_rank = num_leaves // size

        def add(collectives: Any, parts: Tensor = parts, per_rank: int = per_rank) -> Tensor:
            begin = collectives.rank * per_rank
            rows = add_leaves(list(parts[begin : begin + per_rank])).clone()
            collectives.add(rows)
            return rows

        for rows in all_ranks(add, ranks):
            assert torch.equal(rows, add_leaves(list(parts)))
        num_leaves *= 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_bits_come_through_as_they_are(transport: str, dtype: torch.dtype) -> None:
    numbers = {torch.int32: torch.iinfo(torch.int32).min}.get(dtype, float("nan"))
    whole = torch.tensor([[-0.0, numbers, 1.5], [3.0, -0.0, -7.0]]).to(dtype)

    def put_together(collectives: Any) -> Tensor:
        rows = torch.zeros_like(whole)
        rows[collectives.rank] = whole[collectives.rank]
        collectives.add_bits(rows)
        return rows

    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for rows in all_ranks(put_together, make_collectives(transport, 2)):
        assert torch.equal(rows.view(bits), whole.view(bits))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_columns_are_gathered_in_rank_order_at_one_rank(transport: str) -> None:
    def gather(collectives: Any) -> Tensor | None:
        return collectives.gather(torch.full((2, 3), float(collectives.rank)), to=2)

    gathered = all_ranks(gather, make_collectives(transport, 4))
    assert [rows is None for rows in gathered] == [True, True, False, True]
    assert gathered[2] is not None
    assert gathered[2].tolist() == [[0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_best_of_slices_is_the_largest_then_the_lowest_id(transport: str) -> None:
    values = [[1.0, 5.0, -3.0, float("nan")], [2.0, 5.0, -3.5, 9.0]]
    ids = [[7, 3, 1, 0], [99, 2, 98, 97]]

    def exchange(collectives: Any) -> tuple[list[int], list[bool]]:
        mine = np.array(values[collectives.rank], np.float32)
        tokens = np.array(ids[collectives.rank], np.int64)
        best, finite = collectives.exchange_best(mine, tokens, np.isfinite(mine))
        assert best.dtype == np.int64
        return best[:3].tolist(), finite.tolist()

    for result in all_ranks(exchange, make_collectives(transport, 2)):
        assert result == ([99, 2, 1], [True, True, True, False])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_array_of_one_rank_is_told_to_all(transport: str) -> None:
    def broadcast(collectives: Any) -> list[int]:
        array = np.arange(3, dtype=np.int32) * (collectives.rank + 1)
        told = collectives.broadcast(array, root=1).tolist()
        assert array.tolist() == [0, collectives.rank + 1, 2 * collectives.rank + 2], "its own array was written"
        return told

    assert all_ranks(broadcast, make_collectives(transport, 2)) == [[0, 2, 4]] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_are_sent_on_from_rank_to_rank(transport: str) -> None:
    def pass_on(collectives: Any) -> list[float]:
        rows = torch.zeros(3) if collectives.rank else torch.arange(3.0)
        if collectives.rank > 0:
            collectives.receive(rows, collectives.rank - 1)
        if collectives.rank < 3:
            collectives.send(rows + 1, collectives.rank + 1)
        return rows.tolist()

    passed = all_ranks(pass_on, make_collectives(transport, 4))
    assert passed == [[float(rank + i) for i in range(3)] for rank in range(4)]


def test_stages_add_apart_and_the_world_together() -> None:
    groups = gloo_groups(2, 2)

    def add(group: Any) -> tuple[float, int, float]:
        stage, world = torch.tensor([[float(group.world.rank)]]), torch.tensor([[1.0]])
        group.stage.add(stage)
        group.world.add(world)
        return stage.item(), group.stage.rank, world.item()

    assert all_ranks(add, groups) == [(1.0, 0, 4.0), (1.0, 1, 4.0), (5.0, 0, 4.0), (5.0, 1, 4.0)]


@pytest.mark.parametrize("size", SIZES)
def test_silent_collectives_give_the_shapes_of_others_and_wait_for_nobody(size: int) -> None:
    silent = SilentCollectives(size - 1, size)
    rows = torch.ones(2, 3)
    silent.add(rows)
    assert rows.tolist() == [[float(size)] * 3] * 2
    gathered = silent.gather(rows, to=size - 1)
    assert gathered is not None
    assert gathered.shape == (2, 3 * size)
    best, finite = silent.exchange_best(np.ones(2, np.float32), np.array([4, 5]), np.array([True, False]))
    assert (best.tolist(), finite.tolist()) == ([4, 5], [True, False])
    assert silent.broadcast(np.array([1], np.int32), root=0).tolist() == [1]
    silent.send(rows, 0)
    silent.receive(rows, 0)
    assert not rows.any()
    silent.abort("nobody is there")
    assert not silent.is_broken
