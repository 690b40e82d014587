"""The arithmetic of sampling against published vectors and plain definitions, and a row's independence of its batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard_kernels.reference import sampling
from blockyard_kernels.reference.sampling import GREEDY, UNFILTERED, DrawKeys, Filters, numbers_of_candidates
from blockyard_kernels.sampling import Choices
from worker_service.sampling import sampler as edits

WORD = 0xFFFFFFFF


def keys(num_rows: int, *, seed: int = 1) -> DrawKeys:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high: torch.randint(0, high, (num_rows,), generator=generator)  # noqa: E731
    return DrawKeys(draw(1 << 62), draw(4000), draw(8))


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def filters(num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.full((num_rows,), top_k), torch.full((num_rows,), float(top_p)), torch.full((num_rows,), float(min_p))
    )


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_words_of_its_authors(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in sampling.philox((c0, c1, c2, c3), (k0, k1))) == words


def test_noise_of_some_tokens_is_that_of_the_whole_vocabulary() -> None:
    some = keys(16)
    token_ids = torch.randint(0, 1001, (16, 300), generator=torch.Generator().manual_seed(3))
    full = sampling.full_exponential_noise(some, 1001)
    assert full.shape == (16, 1001)
    assert torch.equal(sampling.exponential_noise(some, token_ids), full.gather(1, token_ids))


def test_noise_depends_on_every_part_of_its_key() -> None:
    def noise(seed: int = 5, position: int = 6, index: int = 7) -> torch.Tensor:
        return sampling.full_exponential_noise(
            DrawKeys(torch.tensor([seed]), torch.tensor([position]), torch.tensor([index])), 64
        )

    for other in (noise(seed=6), noise(seed=5 + (1 << 40)), noise(seed=-5), noise(position=7), noise(index=8)):
        assert (other == noise()).float().mean() < 0.05
    assert torch.equal(noise(), noise())


def test_noise_is_exponential() -> None:
    noise = sampling.full_exponential_noise(keys(8), 20_000).double()
    assert noise.min() > 0
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(1, abs=0.015)
    assert noise.var().item() == pytest.approx(1, abs=0.05)
    for quantile in (0.01, 0.5, 0.99):
        assert (noise < -math.log1p(-quantile)).double().mean().item() == pytest.approx(quantile, abs=0.01)


def test_draws_follow_the_softmax() -> None:
    """Pearson's chi-square over 8,000 draws of one distribution: below the 99.9th percentile for 7 degrees."""
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.25])
    temperature, num_draws = 0.8, 8_000
    positions = torch.arange(num_draws)
    several = DrawKeys(torch.full((num_draws,), 1234), positions, torch.zeros_like(positions))
    drawn = sampling.draw(logits.expand(num_draws, 8), torch.full((num_draws,), temperature), several)
    expected = torch.softmax(logits.double() / temperature, -1) * num_draws
    observed = torch.bincount(drawn, minlength=8).double()
    assert ((observed - expected) ** 2 / expected).sum().item() < 24.3


@pytest.mark.parametrize("kind", ["top_k", "top_p", "min_p"])
def test_filtered_draws_follow_the_renormalised_softmax(kind: str) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.25])
    num_draws = 8_000
    chosen = {
        "top_k": filters(num_draws, top_k=4),
        "top_p": filters(num_draws, top_p=0.75),
        "min_p": filters(num_draws, min_p=0.2),
    }
    positions = torch.arange(num_draws)
    several = DrawKeys(torch.full((num_draws,), 77), positions, torch.zeros_like(positions))
    drawn = sampling.draw_filtered(logits.expand(num_draws, 8), torch.ones(num_draws), chosen[kind], several, 64)
    one = chosen[kind].select(torch.tensor([0]))
    kept = sorted(passing(logits, 1.0, int(one.top_k), float(one.top_p), float(one.min_p)))
    expected = torch.softmax(logits[kept].double(), -1) * num_draws
    observed = torch.bincount(drawn, minlength=8).double()
    assert observed.sum() == observed[kept].sum()
    # 99.9th percentile for at most 4 degrees of freedom.
    assert ((observed[kept] - expected) ** 2 / expected).sum().item() < 18.5


def passing(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which token ids pass min_p, then top_k, then top_p: by definition, one token after another."""
    scores = (logits / temperature).tolist()
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))
    best = scores[order[0]]
    order = [
        t for t in order if scores[t] > -math.inf and scores[t] >= best + (math.log(min_p) if min_p else -math.inf)
    ]
    if top_k:
        order = order[:top_k]
    weights = [math.exp(scores[t] - best) for t in order]
    kept, before = set(), 0.0
    for token_id, weight in zip(order, weights, strict=True):
        if top_p < 1 and before >= top_p * sum(weights):
            break
        kept.add(token_id)
        before += weight
    return kept


@pytest.mark.parametrize("num_candidates", [4, 16, 64, 300])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (3, 1.0, 0.0),
        (50, 0.9, 0.0),
        (0, 0.3, 0.0),
        (0, 0.95, 0.0),
        (0, 1.0, 0.2),
        (0, 0.8, 0.05),
        (7, 0.5, 0.3),
        (0, 1e-6, 0.0),
    ],
)
@pytest.mark.parametrize("rounded", [False, True])
def test_the_winner_is_that_of_the_whole_row_masked(
    top_k: int, top_p: float, min_p: float, num_candidates: int, rounded: bool
) -> None:
    """Filtered first or drawn first, with few candidates or many, with ties (rounded logits) or without."""
    logits = random_logits(24, 200)
    if rounded:
        logits = logits.mul(2).round().div(2)
    some, temperature = keys(24), 0.7
    drawn = sampling.draw_filtered(
        logits.clone(), torch.full((24,), temperature), filters(24, top_k, top_p, min_p), some, num_candidates
    )
    for row in range(24):
        kept = sorted(passing(logits[row], temperature, top_k, top_p, min_p))
        masked = torch.full((1, 200), float("-inf"))
        masked[0, kept] = logits[row, kept]
        alone = sampling.draw(masked, torch.tensor([temperature]), some.select(torch.tensor([row])))
        assert int(drawn[row]) == int(alone[0]), row


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_what_passes_is_what_the_definition_says(data: st.DataObject) -> None:
    values = st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.5, 1.0, 1.0, 4.0])
    logits = torch.tensor(data.draw(st.lists(values, min_size=2, max_size=12).filter(lambda v: max(v) > -math.inf)))
    top_k = data.draw(st.integers(0, len(logits)))
    top_p = data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.1]))
    min_p = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    expected = passing(logits, 1.0, top_k, top_p, min_p)
    num_draws = 64
    positions = torch.arange(num_draws)
    several = DrawKeys(torch.full_like(positions, data.draw(st.integers(0, 99))), positions, positions * 0)
    candidates = data.draw(st.sampled_from([1, 3, 64]))
    drawn = sampling.draw_filtered(
        logits.expand(num_draws, -1),
        torch.ones(num_draws),
        filters(num_draws, top_k, top_p, min_p),
        several,
        candidates,
    )
    assert set(drawn.tolist()) <= expected


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    logits = torch.zeros(3, 100)
    logits[1, [40, 70]] = 2.0
    logits[2, 99] = 1.0
    assert sampling.argmax(logits).tolist() == [0, 40, 99]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("method", ["draw", "few", "many", "all", "greedy"])
def test_a_row_is_drawn_alike_in_any_company(method: str, rounded: bool) -> None:
    num_rows, vocab_size = 48, 5000
    logits = random_logits(num_rows, vocab_size)
    if rounded:
        logits = logits.bfloat16().float()
    some = keys(num_rows)
    temperatures = torch.rand(num_rows, generator=torch.Generator().manual_seed(5)) + 0.5
    generator = torch.Generator().manual_seed(6)
    several = Filters(
        torch.randint(0, 60, (num_rows,), generator=generator),
        torch.rand(num_rows, generator=generator) * 0.9 + 0.05,
        torch.rand(num_rows, generator=generator) * 0.01,
    )

    def run(rows: torch.Tensor) -> torch.Tensor:
        if method == "greedy":
            return sampling.argmax(logits[rows])
        if method == "draw":
            return sampling.draw(logits[rows], temperatures[rows], some.select(rows))
        count = {"few": 64, "many": 1024, "all": vocab_size}[method]
        return sampling.draw_filtered(logits[rows], temperatures[rows], several.select(rows), some.select(rows), count)

    whole = run(torch.arange(num_rows))
    shuffled = torch.randperm(num_rows, generator=generator)
    assert torch.equal(run(shuffled), whole[shuffled])
    for size in (1, 2, 3, 7, 31):
        rows = shuffled[:size]
        assert torch.equal(run(rows), whole[rows])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(run(torch.arange(num_rows)), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_large_vocabulary_is_drawn_in_slabs_of_rows() -> None:
    logits, some = random_logits(5, 200_000), keys(5)
    temperatures = torch.ones(5)
    whole = sampling.draw(logits, temperatures, some)
    for row in range(5):
        one = torch.tensor([row])
        assert int(sampling.draw(logits[one], temperatures[one], some.select(one))[0]) == int(whole[row])


def test_masked_tokens_are_never_drawn() -> None:
    logits = random_logits(200, 8)
    rows = torch.arange(200).repeat_interleave(3)
    edits.mask_tokens(logits, rows, torch.tensor([1, 4, 6]).repeat(200))
    drawn = sampling.draw(logits, torch.full((200,), 3.0), keys(200))
    assert set(drawn.tolist()) == {0, 2, 3, 5, 7}


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=15),
    output=st.lists(st.integers(0, 19), max_size=15),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    frequency=st.sampled_from([-1.0, 0.0, 0.4]),
    presence=st.sampled_from([-0.5, 0.0, 1.5]),
)
def test_penalties_are_what_their_definition_says(
    prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> None:
    logits = random_logits(1, 20, seed=len(prompt))
    expected = logits[0].double().tolist()
    for token_id in set(prompt) | set(output):
        value = expected[token_id]
        value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token_id)
        expected[token_id] = value - (presence if token_id in output else 0)
    token_ids = torch.tensor(sorted(set(prompt) | set(output)))
    counts = torch.tensor([float(output.count(t)) for t in token_ids.tolist()])
    columns = [torch.full((len(token_ids),), value) for value in (repetition, frequency, presence)]
    edits.apply_penalties(logits, torch.zeros_like(token_ids), token_ids, counts, (columns[0], columns[1], columns[2]))
    assert logits[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_rows_that_are_not_finite_are_told() -> None:
    logits = random_logits(5, 1000)
    logits[1, 999] = float("nan")
    logits[2, 0] = float("inf")
    logits[4, 7] = float("-inf")
    assert sampling.finite_rows(logits).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "expected"),
    [
        (0.0, 0, 1.0, 0.0, GREEDY),
        (0.0, 5, 0.5, 0.1, GREEDY),
        (1e-5, 0, 1.0, 0.0, UNFILTERED),
        (1.0, 64, 1.0, 0.0, 64),
        (1.0, 65, 0.5, 0.0, 1024),
        (1.0, 1025, 1.0, 0.0, 2000),
        (1.0, 0, 0.99, 0.0, 1024),
        (1.0, 0, 1.0, 0.1, 1024),
    ],
)
def test_how_many_candidates_are_looked_at_follows_from_the_row(
    temperature: float, top_k: int, top_p: float, min_p: float, expected: int
) -> None:
    def column(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.array([value], np.float32)

    nothing = np.zeros(1, np.int64)
    one = Choices(column(temperature), np.array([top_k]), column(top_p), column(min_p), nothing, nothing, nothing)
    assert numbers_of_candidates(one, 2000).tolist() == [expected]
