"""Choices in Triton: against the definition in float64 and the reference, whatever a row asks for and beside whom."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.sampling import CudaSampling
from blockyard_kernels.cuda.tokens.choice import noise_words, pack_choices
from blockyard_kernels.cuda.tokens.last_tokens import put_last_tokens, take_last_tokens
from blockyard_kernels.reference.sampling import ReferenceSampling, philox
from tests.kit.kernels.choices import check_winners, choices, join, order_of, passing, random_logits
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.triton_interpreter import DEVICE, reverse_programs

if TYPE_CHECKING:
    from blockyard_kernels.sampling import Choices, Integers

OPS = CudaSampling(DEVICE)
REFERENCE = ReferenceSampling(torch.device("cpu"))
CHUNK = launch_table.SAMPLING.block
"""Tokens of a program."""


def choose(logits: torch.Tensor, asked: Choices) -> Integers:
    return OPS.choose(logits.to(DEVICE), asked)


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 600},
    {"top_k": 2400, "top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 0.99},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_p": 0.8, "min_p": 0.05},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.3},
    {},
]


def mixed(size: int) -> tuple[torch.Tensor, Choices]:
    """Rows that ask for everything, each with a key of its own: rows of noise, rows with ties, half impossible ones."""
    asked = join(*(choices(1, 0.8 + index % 2, seed=index, **each) for index, each in enumerate(FILTERS)))
    logits = random_logits(len(FILTERS), size)
    kinds = (torch.arange(len(FILTERS)) + size) % 3
    logits[kinds == 1] = logits[kinds == 1].mul(2).round().div(2)
    logits[kinds == 2, size // 2 :] = -math.inf
    return torch.cat([logits, logits[:1]]), join(asked, choices(1, 0.0, top_k=2))


# What is launched


@triton.jit
def _write_words(asked, first, words, BLOCK: tl.constexpr):
    tl.store(words + tl.arange(0, BLOCK), noise_words(first, asked, BLOCK).to(tl.int64))


@pytest.mark.parametrize("first", [0, 2048, 262_080])
@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF])
def test_words_are_those_of_the_reference(first: int, seed: int):
    for position, index in ((0, 0), (5, 2**32 - 1), (2**31, 3)):
        asked = choices(1)
        asked.seeds[:], asked.positions[:], asked.sequence_indexes[:] = seed, position, index
        words = torch.empty(64, dtype=torch.int64, device=DEVICE)
        _write_words[(1,)](torch.from_numpy(pack_choices(asked)).to(DEVICE), first, words, 64)
        counter = (torch.arange(first // 4, first // 4 + 16), *map(torch.tensor, (position, index, 0)))
        key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32 & 0xFFFFFFFF)
        assert torch.equal(words.cpu(), torch.stack(philox(counter, key), 1).flatten())


class _NothingIsRead(TorchDispatchMode):
    """Refuses what waits for the device, and what has as many results as data say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"), func
        return func(*args, **(kwargs or {}))


def test_a_choice_is_launched_without_a_look_at_its_results():
    logits, asked = mixed(300)
    logits, asked = logits[-4:], asked.take(range(8, 12))
    on_device = logits.to(DEVICE)
    with _NothingIsRead():
        found = OPS.launch_choose(on_device, asked)
        finite = OPS.launch_finite_rows(on_device)
    assert (found.dtype, finite.dtype) == (torch.int64, torch.bool)
    with pytest.raises(AssertionError), _NothingIsRead():
        bool(finite.any())


def test_nothing_but_results_is_written_and_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch):
    logits, asked = mixed(CHUNK + 70)
    expected = REFERENCE.choose(logits, asked)
    guards = Guards(monkeypatch)
    around = guards.make(logits.to(DEVICE), *logits.shape).copy_(logits)
    assert choose(around, asked).tolist() == expected.tolist()
    assert torch.equal(around.cpu(), logits)
    guards.check()


# Rows that are not finite


@pytest.mark.parametrize("size", [1, 7, 2049])
def test_rows_that_are_not_finite_are_told(size: int):
    places, bad = sorted({0, size // 2, size - 1}), (math.nan, math.inf, -math.inf)
    logits = random_logits(1 + 3 * len(places), size)
    for row, (place, value) in enumerate(itertools.product(places, bad), 1):
        logits[row, place] = value
    assert OPS.finite_rows(logits.to(DEVICE)).tolist() == [True] + [False] * (3 * len(places))
    assert OPS.finite_rows(torch.full((1, size), torch.finfo(torch.float32).max, device=DEVICE)).all()


def test_what_cannot_be_chosen_is_told_and_harms_no_other_row():
    asked = join(choices(2), choices(1, 0.0), choices(1, top_k=5, top_p=0.9), choices(1, top_p=0.5, min_p=0.1))
    logits = random_logits(5, 300)
    expected = choose(logits, asked)
    for row, bad in enumerate((-math.inf, math.nan, math.nan, -math.inf, math.nan)):
        spoiled = logits.clone()
        spoiled[row] = bad
        found = choose(spoiled, asked)
        assert found[row] == -1
        assert np.delete(found, row).tolist() == np.delete(expected, row).tolist()
    logits[:, ::3] = math.nan
    found = choose(logits, asked)
    assert ((found >= 0) & (found < 300) & (found % 3 > 0)).all()
    logits[:, 77] = math.inf
    assert (choose(logits, asked) == -1).all()


def test_nothing_to_do_is_no_error():
    logits, nothing = torch.empty(0, 100, device=DEVICE), np.zeros(0, np.int64)
    assert OPS.finite_rows(logits).shape == OPS.choose(logits, choices(0)).shape == (0,)
    assert OPS.token_logprobs(logits, nothing, nothing, 3).token_ids.shape == (0, 4)
    assert take_last_tokens(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)).shape == (0,)


# Choices


@pytest.mark.parametrize("size", [1, 2, 9, 63, 2047, 2048, 2049, 5001])
def test_the_first_token_is_the_largest_with_the_lowest_id(size: int):
    logits = torch.cat([random_logits(1, size), random_logits(2, size).round(), torch.zeros(1, size)])
    logits[1, : size // 2] = -math.inf
    expected = [order_of(row)[0] for row in logits.tolist()]
    assert choose(logits, choices(4, 0.0, top_k=2, top_p=0.1, min_p=1.0)).tolist() == expected
    drawn = join(choices(4, 0.0), choices(1))
    assert choose(torch.cat([logits, logits[:1]]), drawn)[:4].tolist() == expected


@pytest.mark.parametrize("size", [1, 2, 5, 63, 2049, 5001])
def test_a_draw_is_the_winner_of_the_race(size: int):
    logits = torch.cat([random_logits(2, size), random_logits(2, size).round(), random_logits(2, size, scale=30)])
    logits[1, 1::2] = -math.inf
    asked = choices(6, 0.7)
    drawn = choose(logits, asked)
    check_winners(drawn, logits, asked)
    assert drawn.tolist() == REFERENCE.choose(logits, asked).tolist()


@pytest.mark.parametrize("size", [300, CHUNK + 401])
def test_what_is_filtered_is_the_winner_among_those_that_pass(size: int):
    """Of fewer groups of tokens than some rows' top_k, and of more."""
    logits, asked = mixed(size)
    drawn = choose(logits, asked)
    check_winners(drawn[:-1], logits, asked)
    assert drawn.tolist() == REFERENCE.choose(logits, asked).tolist()


def test_of_a_peaked_row_few_tokens_are_looked_at():
    """Most groups hold none that may pass; the best are in the first, the last and the same one."""
    logits = random_logits(6, 5001, scale=20.0)
    logits[3:, 4990:] += 60
    logits[4, :3] += 60
    asked = join(*(choices(2, 0.9, seed=seed, **FILTERS[seed]) for seed in (1, 5, 8)))
    drawn = choose(logits, asked)
    check_winners(drawn, logits, asked)
    assert drawn.tolist() == REFERENCE.choose(logits, asked).tolist()


def test_ties_and_impossible_tokens_pass_as_the_definition_says():
    random = np.random.default_rng(0)
    for _ in range(8):
        values = random.choice([-math.inf, -3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0, 4.0], random.integers(1, 70))
        values[random.integers(len(values))] = 0.0
        filters = {
            "top_k": int(random.integers(0, len(values) + 2)),
            "top_p": float(random.choice([1.0, 0.9, 0.5, 0.1])),
            "min_p": float(random.choice([0.0, 0.01, 0.3, 1.0])),
        }
        logits, asked = torch.tensor(values, dtype=torch.float32).expand(2, -1).contiguous(), choices(2, **filters)
        check_winners(choose(logits, asked), logits, asked)


def test_of_tokens_that_tie_at_the_last_place_the_lowest_ids_pass():
    """More tie than may pass, in both chunks: by their number, and by their share."""
    logits = torch.full((16, CHUNK + 900), -30.0)
    logits[:, [CHUNK + 500, 100]] = 1.0
    logits[:, [3, 4, 5, 6, CHUNK + 3]] = 0.9
    asked = join(choices(6, top_k=3), choices(6, top_p=0.4, seed=2), choices(4, top_k=5, top_p=0.7, seed=3))
    assert [passing(logits, asked, row)[2:] for row in (0, 6, 12)] == [[3], [3], [3, 4]]
    check_winners(choose(logits, asked), logits, asked)


def test_logits_may_differ_and_their_values_tie():
    """Neighbouring numbers, the larger the higher the id: where two are one value, the lower id comes first."""
    logits = (torch.arange(1000) * 2.0**-23 + 1.95).expand(4, -1).contiguous()
    asked = choices(4, 1.9, top_k=5)
    assert len((logits[0] / 1.9).unique()) < 750
    check_winners(choose(logits, asked), logits, asked)


@pytest.mark.parametrize(("temperature", "largest"), [(1e-5, 1e30), (1e-5, 1.0), (1e4, 1e-30), (3e38, 1e30)])
def test_numbers_at_the_ends_of_their_range(temperature: float, largest: float):
    logits = random_logits(3, 200)
    logits = logits / logits.abs().max() * largest
    filters: tuple[dict[str, Any], ...] = ({}, {"top_k": 9}, {"top_p": 0.5, "min_p": 0.01})
    asked = join(*(choices(1, temperature, **each) for each in filters))
    assert choose(logits, asked).tolist() == REFERENCE.choose(logits, asked).tolist()


def test_a_row_is_chosen_alike_in_any_company_and_order(monkeypatch: pytest.MonkeyPatch):
    logits, asked = mixed(CHUNK + 30)
    whole = choose(logits, asked)
    reverse_programs(monkeypatch)
    for rows in ([1], [9, 0, 8, 11]):
        places = np.array(rows)
        assert np.array_equal(choose(logits[places], asked.take(places)), whole[places]), rows


# Masks of grammars


@pytest.mark.parametrize("size", [1, 31, 33, 1024, 2500])
def test_masked_tokens_are_those_of_the_reference(size: int, monkeypatch: pytest.MonkeyPatch):
    logits, words = (
        random_logits(5, size),
        np.random.default_rng(size).integers(0, 2**32, (3, -(-size // 32)), np.uint32),
    )
    words[1], words[2, ::2], rows = 0, 2**32 - 1, np.array([4, 0, 2])
    expected, guards = logits.clone(), Guards(monkeypatch)
    REFERENCE.apply_masks(expected, rows, words)
    masked = guards.make(torch.empty(0, device=DEVICE), *logits.shape).copy_(logits)
    OPS.apply_masks(masked, rows, words)
    OPS.apply_masks(masked, rows[:0], words[:0])
    assert torch.equal(masked.cpu(), expected)
    guards.check()


# Tokens that the host does not know


def test_unknown_tokens_are_those_that_rows_sampled_last(monkeypatch: pytest.MonkeyPatch):
    guards = Guards(monkeypatch)
    table = guards.make(torch.empty(0, dtype=torch.int64, device=DEVICE), 300).copy_(torch.arange(300) + 1000)
    rows = torch.arange(299, -1, -1, device=DEVICE)[::3].contiguous()
    put_last_tokens(table, rows, -rows - 1)
    expected = torch.arange(300) + 1000
    expected[rows.cpu()] = -rows.cpu() - 1
    assert torch.equal(table.cpu(), expected)
    token_ids = torch.tensor([5, -1, 0, -3, 2**40, -300] * 60, device=DEVICE)
    found = take_last_tokens(token_ids, table)
    assert found.tolist() == [5, 1000, 0, 0, 2**40, 0] * 60, "row 2 and row 299 have no token"
    guards.check()
