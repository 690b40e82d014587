"""Attention in Triton against the reference, the bits of its rows in every company, and where it writes."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from blockyard_kernels import planning
from blockyard_kernels.cuda import plan
from blockyard_kernels.cuda.attention import attend, paged_attention
from blockyard_kernels.ops import AttentionBatch, kv_pool_shape
from blockyard_kernels.reference import attention as reference
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES, IS_INTERPRETED

# Of values whose standard deviation is 1: sums in another order, and weights and results of two bytes.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LAYER = 1
# The interpreter is slow: each dtype and each mode once.
MODES = [(torch.float32, True), (torch.float16, False)] if IS_INTERPRETED else list(product(DTYPES, [False, True]))
USUAL = AttentionShape(2, 1, 16, 0.25)
# Linux; Python 3.11 does not name it.
MAP_NORESERVE = 0x4000


@dataclass(frozen=True)
class Step:
    """Sequences whose keys and values lie in a pool that is NaN elsewhere, and the queries of a step."""

    shape: AttentionShape
    batch: AttentionBatch
    pool: torch.Tensor
    query: torch.Tensor
    sinks: torch.Tensor | None = None

    def compute(self, window: int | None = None, *, invariant: bool, num_multiprocessors: int = 4) -> torch.Tensor:
        arguments = (self.query, self.batch, self.pool, LAYER, self.shape, window, self.sinks)
        with pytest.MonkeyPatch.context() as patch:
            guards = Guards(patch)
            result = paged_attention(*arguments, invariant=invariant, num_multiprocessors=num_multiprocessors)
        guards.check()
        return result

    def expected(self, window: int | None, shape: AttentionShape | None = None) -> torch.Tensor:
        """In float32 on the processor, of the same numbers."""
        lengths = (self.batch.num_new_tokens, self.batch.seq_lens, self.batch.block_tables)
        batch = planning.plan(*lengths, self.batch.block_size, None, torch.device("cpu"))
        pool = self.pool.cpu().float().nan_to_num(0.0)
        sinks = None if self.sinks is None else self.sinks.cpu()
        query = self.query.cpu().float()
        return reference.paged_attention(query, batch, pool, LAYER, shape or self.shape, window, 4, sinks)


def make_step(
    new: list[int],
    lens: list[int],
    shape: AttentionShape = USUAL,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    names: list[int] | None = None,
    *,
    has_sinks: bool = False,
) -> Step:
    """The same keys, values and queries of each name and length in every step; names count up if none are given."""
    num_blocks = [-(-length // block_size) for length in lens]
    places = list(range(sum(num_blocks) + 3))
    random.Random(len(places)).shuffle(places)
    tables = [[places.pop() for _ in range(count)] for count in num_blocks]
    pool = torch.full(kv_pool_shape(sum(num_blocks) + 3, 2, shape.num_kv_heads, block_size, shape.head_dim), torch.nan)
    queries: list[torch.Tensor] = []
    for name, count, length, table in zip(names or range(len(new)), new, lens, tables, strict=True):
        generator = torch.Generator().manual_seed(name)
        numbers = torch.randn(length, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
        asked, stored = numbers.split([shape.num_heads, 2 * shape.num_kv_heads], 1)
        queries.append(asked[length - count :])
        for position, place in enumerate(stored.unflatten(1, (2, shape.num_kv_heads))):
            pool[table[position // block_size], LAYER, :, :, position % block_size] = place
    batch = planning.plan(new, lens, tables, block_size, None, DEVICE)
    sinks = torch.linspace(3, -1, shape.num_heads, device=DEVICE) if has_sinks else None
    return Step(shape, batch, pool.to(DEVICE, dtype), torch.cat(queries).to(DEVICE, dtype), sinks)


@pytest.mark.parametrize(("dtype", "invariant"), MODES, ids=str)
@pytest.mark.parametrize(
    ("new", "lens", "shape", "block_size", "window", "has_sinks"),
    [
        pytest.param([1, 1, 0, 1], [300, 17, 9, 1], AttentionShape(8, 2, 64, 0.125), 16, None, False, id="decodes"),
        pytest.param(
            [40, 3], [101, 3], AttentionShape(6, 2, 80, 0.1, 1.5), 8, None, True, id="bounded, sinks, groups of 3"
        ),
        pytest.param([1, 20, 2], [150, 70, 90], AttentionShape(7, 1, 96, 0.1), 32, 37, True, id="a window, sinks"),
        pytest.param([1, 20], [520, 150], AttentionShape(2, 2, 128, 0.09), 256, 130, False, id="a long window"),
        pytest.param([9, 1], [40, 65], AttentionShape(8, 1, 256, 0.06, 0.5), 64, 1, False, id="a window of 1, bounded"),
        pytest.param(
            [1, 5], [64, 128], AttentionShape(71, 1, 20, 0.2, 2.0), 128, None, False, id="bounded, large groups"
        ),
    ],
)
def test_rows_are_those_of_the_reference(
    new: list[int],
    lens: list[int],
    shape: AttentionShape,
    block_size: int,
    window: int | None,
    has_sinks: bool,
    invariant: bool,
    dtype: torch.dtype,
):
    step = make_step(new, lens, shape, block_size, dtype, has_sinks=has_sinks)
    got = step.compute(window, invariant=invariant)
    assert got.dtype is dtype
    near: dict[str, Any] = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got.cpu().float(), step.expected(window), **near)
    without = [replace(step, sinks=None).expected(window)] if has_sinks else []
    # Of one key the score is of no matter.
    without += [step.expected(window, replace(shape, softcap=0.0))] if shape.softcap and window != 1 else []
    assert not any(torch.allclose(got.cpu().float(), other, **near) for other in without)


def work_list(step: Step) -> plan.WorkList:
    """The only one of a step that was computed."""
    (work,) = [each for each in step.batch.work_lists.values() if isinstance(each, plan.WorkList)]
    return work


SUBJECT = 1100
# In the interpreter the dtype that hides no bit; on a GPU the one that is multiplied as models are.
EXACT = torch.float32 if IS_INTERPRETED else torch.bfloat16


BOUNDED = replace(USUAL, softcap=2.0)


@pytest.fixture(scope="module", params=[None, 560], ids=["all keys", "a window, bounded, sinks"])
def window(request: pytest.FixtureRequest) -> int | None:
    return request.param


def make_subject(new: list[int], lens: list[int], names: list[int], window: int | None) -> Step:
    """With all that attention may have where there is a window, and with nothing else elsewhere."""
    return make_step(new, lens, USUAL if window is None else BOUNDED, 16, EXACT, names, has_sinks=window is not None)


@pytest.fixture(scope="module")
def alone(window: int | None) -> torch.Tensor:
    """The last rows of a long sequence in a step of their own, in which one program walks through all splits."""
    step = make_subject([90], [SUBJECT], [5], window)
    return step.compute(window, invariant=True, num_multiprocessors=1)


@pytest.mark.parametrize(
    ("new", "lens", "place", "num_multiprocessors"),
    [
        pytest.param([1] * 5, [SUBJECT, *[1000] * 4], 0, 1, id="a decode, whole"),
        pytest.param([1, 1], [SUBJECT, 30], 0, 8, id="a decode in splits"),
        pytest.param([60, 3, 1], [90, SUBJECT, 600], 1, 8, id="a few tokens in splits among others"),
        pytest.param([1, 33], [700, SUBJECT], 1, 8, id="a piece in splits"),
    ],
)
def test_a_row_has_the_same_bits_alone_and_in_company(
    new: list[int], lens: list[int], place: int, num_multiprocessors: int, window: int | None, alone: torch.Tensor
):
    step = make_subject(new, lens, [5 if index == place else 50 + index for index in range(len(new))], window)
    got = step.compute(window, invariant=True, num_multiprocessors=num_multiprocessors)
    first = sum(new[:place])
    assert torch.equal(got[first : first + new[place]], alone[-new[place] :])
    is_split = bool((work_list(step).tiles[:, :, 7] > 1).any())
    assert is_split == (num_multiprocessors > 1), "the splits were to be of several programs"


@pytest.mark.parametrize(("max_partials", "splits"), [(0, [1, 1]), (4, [3, 1]), (5, [3, 2])])
def test_what_has_no_room_for_partial_results_is_not_cut(
    max_partials: int, splits: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plan, "PARTIAL_BYTES", max_partials * USUAL.num_heads * (USUAL.head_dim + 2) * 4)
    step = make_step([1, 1], [SUBJECT, 900])
    got = step.compute(invariant=True, num_multiprocessors=8)
    assert work_list(step).tiles[0, :, 7].tolist() == splits
    torch.testing.assert_close(got.cpu(), step.expected(None), rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    assert torch.equal(make_step([1, 1], [SUBJECT, 900]).compute(invariant=True, num_multiprocessors=1), got)


def test_layers_share_a_work_list():
    step = make_step([1, 20], [300, 20])
    first = step.compute(invariant=False)
    kept = dict(step.batch.work_lists)
    assert torch.equal(step.compute(invariant=False), first)
    assert step.batch.work_lists == kept
    step.compute(64, invariant=False)
    assert len(step.batch.work_lists) == len(kept) + 1, "layers with a window have their own"


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
def test_rows_of_padding_are_zeros(invariant: bool):
    """A captured step of 5 sequences and 40 rows, of which 3 sequences and 32 rows are there."""
    step = make_step([1, 30, 1], [300, 30, 40], has_sinks=True)
    tables = torch.from_numpy(step.batch.block_tables).to(DEVICE, torch.int32)
    tables = torch.cat([tables, torch.zeros_like(tables[:2])])

    def send(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    lengths = plan.StepLengths(send([1, 30, 1, 1, 7]), send([300, 30, 40, 0, 0]), tables, 40, 64)
    query = torch.cat([step.query, torch.full_like(step.query[:8], torch.nan)])
    work = plan.make_work_list(lengths, step.shape, 16, None, 4, invariant=invariant)
    got = attend(query, work, step.pool, LAYER, step.shape, step.sinks)
    assert torch.equal(got[:32], step.compute(invariant=invariant))
    assert torch.equal(got[32:], torch.zeros_like(got[32:]))


def test_a_step_without_sequences_has_no_rows():
    batch = planning.plan([], [], [], 16, None, DEVICE)
    query, pool = torch.zeros(0, 2, 16, device=DEVICE), torch.zeros(kv_pool_shape(1, 2, 1, 16, 16), device=DEVICE)
    got = paged_attention(query, batch, pool, LAYER, USUAL, invariant=False, num_multiprocessors=4)
    assert got.shape == (0, 32)


def reserve(num_elements: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes so many elements of float16, zeros, and returns the first and the last `size`, which do not share storage.

    On a processor there is no memory but for the pages that are touched.
    """
    if not IS_INTERPRETED:
        whole = torch.zeros(num_elements, dtype=torch.float16, device=DEVICE)
        return whole[:size], whole[-size:]
    memory = mmap.mmap(-1, 2 * num_elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    last = torch.frombuffer(memory, dtype=torch.float16, count=size, offset=2 * (num_elements - size))
    return torch.frombuffer(memory, dtype=torch.float16, count=size), last


def test_offsets_past_two_to_the_32_are_right():
    """The pool is the beginning of 4.3e9 elements, the table names blocks at their end: 32 bits would find zeros."""
    near = make_step([1], [40], dtype=torch.float16)
    size, block = near.pool.numel(), near.pool[0].numel()
    first = 2**32 // block
    beginning, end = reserve(first * block + size, size)
    end.copy_(near.pool.flatten())
    batch = planning.plan([1], [40], near.batch.block_tables + first, 16, None, DEVICE)
    far = Step(USUAL, batch, beginning.view(near.pool.shape), near.query)
    assert torch.equal(far.compute(invariant=False), near.compute(invariant=False))
