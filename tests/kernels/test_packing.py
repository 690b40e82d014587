"""Weights in panels, each element where the layout says, on every instruction set; and the memory that they lie in."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from blockyard_kernels.arena import ALIGNMENT, CHUNK_BYTES
from blockyard_kernels.cpu.huge_pages import HUGE_PAGE_BYTES, HostArena, allocate_huge
from blockyard_kernels.cpu.packed import CpuLinear, panel_columns, row_addresses
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import LinearSpec
from tests.kit.kernels.backends import CPU, INSTRUCTION_SETS, build_kernels
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from blockyard_kernels.cpu.backend import CpuBackend

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    build_kernels()


def backend_of(dtype: torch.dtype, instruction_set: str = INSTRUCTION_SETS[0]) -> CpuBackend:
    return cast("CpuBackend", get_backend(CPU, dtype, instruction_set))


def pack(backend: CpuBackend, *parts: torch.Tensor, gated: bool = False) -> CpuLinear:
    packed = backend.pack_linear(parts, spec=LinearSpec(gated=gated))
    assert isinstance(packed, CpuLinear)
    return packed


def unpack(packed: CpuLinear, width: int) -> torch.Tensor:
    """Gives the columns of all panels [panels * width, in_features], by the layout that csrc/linear.h describes."""
    per_word = 4 // packed.dtype.itemsize
    num_words = packed.in_features // per_word
    panels = packed.weight.view(packed.dtype).view(-1, num_words, width, per_word)
    return panels.transpose(1, 2).reshape(-1, packed.in_features)


def width_of(instruction_set: str) -> int:
    return 16 if instruction_set == "avx2" else 32


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 15, 16, 31, 32, 33, 96, 100])
@pytest.mark.parametrize("in_features", [2, 30, 32, 34, 64, 200])
def test_rows_are_the_columns_of_panels(
    instruction_set: str, dtype: torch.dtype, num_rows: int, in_features: int
) -> None:
    backend, width = backend_of(dtype, instruction_set), width_of(instruction_set)
    weight = random(num_rows, in_features, dtype=dtype)
    columns = unpack(pack(backend, weight), width)
    assert len(columns) == -(-num_rows // width) * width
    assert torch.equal(columns[:num_rows], weight)
    assert not columns[num_rows:].any(), "what no row fills is zero"


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_outputs", [1, 8, 15, 16, 17, 40])
def test_a_gated_weight_has_as_many_gates_as_ups_in_a_panel(instruction_set: str, num_outputs: int) -> None:
    backend, width = backend_of(torch.bfloat16, instruction_set), width_of(instruction_set)
    gates, ups = random(num_outputs, 6, dtype=torch.bfloat16), random(num_outputs, 6, dtype=torch.bfloat16, seed=1)
    packed = pack(backend, gates, ups, gated=True)
    assert (packed.out_features, packed.num_rows, packed.is_table) == (num_outputs, 2 * num_outputs, False)
    sides = unpack(packed, width).view(-1, 2, width // 2, 6).transpose(0, 1).reshape(2, -1, 6)
    assert torch.equal(sides[0, :num_outputs], gates)
    assert torch.equal(sides[1, :num_outputs], ups)
    assert not sides[:, num_outputs:].any()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("lengths", [[70], [1, 1, 1], [30, 5, 35], [64, 64], [3, 150]])
def test_parts_are_packed_as_one_weight(lengths: list[int], num_threads: int) -> None:
    backend = backend_of(torch.bfloat16)
    weight = random(sum(lengths), 48, dtype=torch.bfloat16)
    whole = pack(backend, weight)
    backend.set_num_threads(num_threads)
    parts = [part.clone() for part in weight.split(lengths)]
    packed = pack(backend, *parts)
    assert torch.equal(packed.weight, whole.weight)
    for part in parts:
        part.fill_(7)
    assert torch.equal(packed.weight, whole.weight), "of the parts nothing is kept"
    assert packed.num_rows == packed.out_features == sum(lengths)


def test_rows_may_lie_anywhere() -> None:
    backend = backend_of(torch.bfloat16)
    table = random(50, 64, dtype=torch.bfloat16)
    sparse, turned = table[::3, :20], table[:40, :10].t()
    assert torch.equal(pack(backend, sparse).weight, pack(backend, sparse.clone()).weight)
    assert torch.equal(pack(backend, turned).weight, pack(backend, turned.clone()).weight)
    content = torch.zeros(1 + 8 * 20 * 2, dtype=torch.uint8)
    content[1:] = sparse[:8].contiguous().view(torch.uint8).flatten()
    unaligned = torch.frombuffer(content.numpy(), dtype=torch.bfloat16, offset=1, count=160).view(8, 20)
    assert torch.equal(pack(backend, unaligned).weight, pack(backend, sparse[:8]).weight)


def test_an_odd_width_is_refused() -> None:
    backend = backend_of(torch.bfloat16)
    with pytest.raises(ValueError, match=r"in_features must be even in torch\.bfloat16, not 7"):
        backend.pack_linear(torch.zeros(4, 7, dtype=torch.bfloat16))
    assert pack(backend_of(torch.float32), torch.zeros(4, 7)).in_features == 7


def test_addresses_are_those_of_rows() -> None:
    parts = [torch.zeros(3, 4), torch.zeros(2, 9)[:, :4]]
    addresses = row_addresses(parts)
    assert addresses.tolist() == [row.data_ptr() for part in parts for row in part]
    assert panel_columns(np.arange(1, 6, dtype=np.uintp), 4, gated=False).tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert panel_columns(np.arange(1, 7, dtype=np.uintp), 4, gated=True).tolist() == [1, 2, 4, 5, 3, 0, 6, 0]


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1])
def test_huge_memory_begins_at_a_huge_page_and_is_zero(num_bytes: int) -> None:
    memory = allocate_huge(num_bytes)
    assert memory.shape == (num_bytes,)
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not memory.any()
    memory.fill_(1)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_taken_when_it_is_written() -> None:
    before = resident_bytes()
    memory = allocate_huge(256 << 20)
    assert resident_bytes() - before < 16 << 20
    memory[: 64 << 20] = 1
    assert 60 << 20 < resident_bytes() - before < 80 << 20
    del memory
    assert resident_bytes() - before < 16 << 20


def test_parts_of_a_chunk_do_not_overlap() -> None:
    memory = HostArena()
    sizes = [1, 64, 100, CHUNK_BYTES - 1000, 5000, 3 * CHUNK_BYTES, 10]
    parts = [memory.take(size) for size in sizes]
    assert [len(part) for part in parts] == sizes
    begins = sorted((part.data_ptr(), len(part)) for part in parts)
    assert all(begin % ALIGNMENT == 0 for begin, _ in begins)
    assert all(begin + size <= following for (begin, size), (following, _) in pairwise(begins))
    parts[0].fill_(3)
    assert not parts[1].any()


def test_an_arena_hands_out_the_same_places_once_it_is_rewound() -> None:
    arena = HostArena()
    sizes = [100, CHUNK_BYTES - 64, 5000, 2 * CHUNK_BYTES, 7]
    before = [arena.take(size).data_ptr() for size in sizes]
    used_bytes = arena.used_bytes
    arena.rewind()
    assert [arena.take(size).data_ptr() for size in sizes] == before
    assert arena.used_bytes == used_bytes


def test_an_arena_gives_its_pages_up_and_keeps_its_addresses() -> None:
    arena = HostArena()
    part = arena.take(CHUNK_BYTES)
    before = resident_bytes()
    part.fill_(7)
    arena.give_up(keeps=True)
    assert part.min() == 7
    arena.give_up(keeps=False)
    assert resident_bytes() - before < 4 << 20
    arena.restore()
    assert not part.any()
    part.fill_(5)
    assert part.min() == 5
