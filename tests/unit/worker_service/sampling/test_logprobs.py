"""Log probabilities of chosen tokens and of prompts: against transformers, against their definition, in any company."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.capacity import steps
from blockyard.common.v1 import sampling_pb2
from blockyard.contract.sampling import SamplingParams
from blockyard_kernels.reference import logprobs as arithmetic
from blockyard_kernels.select import get_backend
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service import driver
from tests.unit.worker_service.executor import Epoch, candidates_of, make_executor, new_sequence
from tests.unit.worker_service.rows import VOCAB, make_sampler, rows_of, sequence
from worker_service.models.loader import load_model
from worker_service.runner import model_runner
from worker_service.runner.dry_runs import profile
from worker_service.sampling import logprobs
from worker_service.step import NO_LOGPROBS, ForkedRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.worker_service.driver import WorkerDriver
    from worker_service.models.loader import RunnableModel
    from worker_service.sampling.sampler import Sampled
    from worker_service.step import Array, Logprobs, NewRow

CPU = torch.device("cpu")
Told = list[list[tuple[int, float, int]]]
PROMPT = [(7 * place * place + 3) % 300 for place in range(29)]
TABLE = range(1, 11)


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


# The arithmetic


def of_tokens(logits: torch.Tensor, token_ids: Array, num_best: Array) -> Logprobs:
    ops = get_backend(CPU, torch.float32, "reference").sampling
    return logprobs.of_tokens(ops, logits, np.arange(len(logits)), token_ids, num_best)


def best_by_definition(scores: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))[:count]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 12).flatmap(
        lambda width: st.lists(
            st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.0, 2.5]), min_size=width, max_size=width),
            min_size=1,
            max_size=5,
        )
    ),
    data=st.data(),
)
def test_the_best_are_those_of_the_definition(rows: list[list[float]], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(rows[0])))
    scores = torch.tensor(rows)
    assert arithmetic.best_tokens(scores, count).tolist() == [best_by_definition(row, count) for row in rows]
    chosen = torch.tensor([data.draw(st.integers(0, len(row) - 1)) for row in rows])
    places = [
        best_by_definition(row, len(row)).index(token_id) + 1
        for row, token_id in zip(rows, chosen.tolist(), strict=True)
    ]
    assert arithmetic.ranks(scores, chosen).tolist() == places


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_row_is_told_of_alike_in_any_company_and_with_any_threads(num_threads: int) -> None:
    logits = random_logits(12, 152_064).bfloat16().float()
    token_ids = np.arange(12) * 1000
    counts = np.arange(12) % 6
    whole = candidates_of(of_tokens(logits, token_ids, counts))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        for rows in ([3], [7, 1], [11, 4, 2, 9, 0]):
            some = of_tokens(logits[rows], token_ids[rows], counts[rows])
            assert candidates_of(some) == [whole[row] for row in rows]
    finally:
        torch.set_num_threads(before)


def test_a_rows_mass_does_not_round_by_its_company() -> None:
    """A sum that is cut among threads gives itself away in one row of fifteen."""
    logits, before = random_logits(60, 152_064), torch.get_num_threads()
    whole = arithmetic.log_softmax(logits)[:, :4]
    try:
        torch.set_num_threads(2)
        alone = [arithmetic.log_softmax(logits[row : row + 1])[0, :4] for row in range(60)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.stack(alone), whole)


def test_more_than_the_vocabulary_are_the_whole_vocabulary() -> None:
    told = candidates_of(of_tokens(random_logits(2, 5), np.array([4, 0]), np.array([5, 2])))
    assert sorted(token_id for token_id, _, _ in told[0][1:]) == [0, 1, 2, 3, 4]
    assert sum(math.exp(value) for _, value, _ in told[0][1:]) == pytest.approx(1, abs=1e-6)
    assert [len(one) for one in told] == [6, 3]


def test_columns_are_cut_and_joined_without_loss() -> None:
    logits, token_ids, counts = random_logits(7, 50), np.arange(7), np.array([0, 3, 1, 0, 0, 5, 2])
    whole = of_tokens(logits, token_ids, counts)
    for lengths in ([7], [1, 6], [3, 1, 3], [1] * 7):
        parts = logprobs.split(whole, lengths)
        assert [len(part) for part in parts] == lengths
        assert [one for part in parts for one in candidates_of(part)] == candidates_of(whole)
        assert candidates_of(logprobs.concatenate(parts)) == candidates_of(whole)


# The sampler


def sampled(logits: torch.Tensor, *sequences: NewRow) -> Sampled:
    return make_sampler().sample(logits.clone(), rows_of(*sequences))


def test_the_chosen_token_comes_first_with_its_rank_then_the_best() -> None:
    logits = random_logits(1)
    found = sampled(logits, sequence(seed=4, temperature=3.0, logprobs=3))
    expected = torch.log_softmax(logits[0].double(), -1)
    order = best_by_definition(logits[0].tolist(), VOCAB)
    chosen = int(found.token_ids[0])
    (told,) = candidates_of(found.logprobs)
    assert [token_id for token_id, _, _ in told] == [chosen, *order[:3]]
    assert [rank for _, _, rank in told] == [order.index(chosen) + 1, 1, 2, 3]
    assert [value for _, value, _ in told] == pytest.approx([float(expected[t]) for t, _, _ in told], abs=1e-5)


def test_they_are_of_the_logits_before_anything_changed_them() -> None:
    logits = random_logits(1)
    plain = sampled(logits, sequence(temperature=0.0, logprobs=4))
    edits: dict[str, Any] = {
        "logit_bias": {5: 50.0},
        "allowed_token_ids": (5, 6),
        "bad_token_sequences": ((6,),),
        "repetition_penalty": 1.5,
        "top_k": 1,
    }
    edited = sampled(logits, sequence([5, 6], 1, temperature=0.5, logprobs=4, **edits))
    assert edited.token_ids.tolist() == [5]
    best, (chosen, *edited_best) = candidates_of(plain.logprobs)[0][1:], candidates_of(edited.logprobs)[0]
    assert edited_best == best
    assert chosen[1] == pytest.approx(float(torch.log_softmax(logits[0], -1)[5]), abs=1e-6)


MIXED = [
    sequence(temperature=0.0, logprobs=0),
    sequence(seed=1),
    sequence(seed=2, temperature=0.4, top_k=5, logprobs=20),
    sequence(seed=3, top_p=0.8, logprobs=1),
    sequence([3, 8], 1, temperature=0.0, logit_bias={7: 5.0}),
    sequence([3, 8], 1, temperature=0.0, logit_bias={7: 5.0}, logprobs=2),
]


def test_only_rows_that_ask_are_told_of_and_alike_alone_and_together() -> None:
    logits = random_logits(len(MIXED))
    together = sampled(logits, *MIXED)
    assert together.has_logprobs.tolist() == [True, False, True, True, False, True]
    alone = [sampled(logits[row : row + 1], one) for row, one in enumerate(MIXED)]
    assert candidates_of(together.logprobs) == [told for one in alone for told in candidates_of(one.logprobs)]
    assert [len(told) for told in candidates_of(together.logprobs)] == [1, 21, 2, 3]
    unasked = sampled(logits[[1, 4]], MIXED[1], MIXED[4])
    assert unasked.logprobs is NO_LOGPROBS
    assert unasked.token_ids.tolist() == together.token_ids[[1, 4]].tolist()


def test_a_row_that_fails_is_not_told_of() -> None:
    logits = random_logits(len(MIXED))
    expected = candidates_of(sampled(logits, *MIXED).logprobs)
    logits[2, 9] = float("nan")
    found = sampled(logits, *MIXED)
    assert found.has_logprobs.tolist() == [True, False, False, True, False, True]
    assert candidates_of(found.logprobs) == [expected[0], *expected[2:]]
    logits[:] = float("nan")
    assert not sampled(logits, *MIXED).has_logprobs.any()


# Through the network


@pytest.fixture(scope="module")
def loaded() -> RunnableModel:
    return load_model(tiny_model("llama"), torch.float32, CPU, lambda done, total: None)


@pytest.fixture(scope="module")
def half() -> RunnableModel:
    return load_model(tiny_model("qwen3"), torch.bfloat16, CPU, lambda done, total: None)


@torch.no_grad()
def reference_logprobs(token_ids: Sequence[int]) -> torch.Tensor:
    """What transformers says of the token after each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()
    return torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0], -1)


def check_against(told: Told, token_ids: Sequence[int], expected: torch.Tensor, num_best: int) -> None:
    """`told` is of `token_ids`, of which row by row of `expected` tells."""
    for candidates, token_id, row in zip(told, token_ids, expected, strict=True):
        assert candidates[0][0] == token_id
        assert len(candidates) == num_best + 1
        for candidate, value, rank in candidates:
            assert value == pytest.approx(float(row[candidate]), abs=1e-4)
            better = int((row > row[candidate] + 1e-4).sum()), int((row >= row[candidate] - 1e-4).sum())
            assert better[0] + 1 <= rank <= better[1]
        assert [rank for _, _, rank in candidates[1:]] == list(range(1, num_best + 1))


@pytest.mark.parametrize("num_best", [0, 1, 20])
def test_a_generation_is_told_as_transformers_sees_it(loaded: RunnableModel, num_best: int) -> None:
    epoch = Epoch(make_executor(loaded), 1)
    asked = SamplingParams(seed=5, logprobs=num_best)
    result = epoch.execute(new_sequences=(new_sequence(1, PROMPT, TABLE, asked),), work=[(1, len(PROMPT))])
    output, told = [*result.token_ids], candidates_of(result.logprobs)
    for _ in range(5):
        result = epoch.execute(work=[(1, 1)])
        assert result.logprob_sequence_ids == (1,)
        output += result.token_ids
        told += candidates_of(result.logprobs)
    expected = reference_logprobs(PROMPT + output)
    check_against(told, output, expected[len(PROMPT) - 1 : -1], num_best)


def tell_prompt(
    loaded: RunnableModel, pieces: Sequence[int], asked: SamplingParams, *, company: bool = False, **fields: Any
) -> dict[int, Any]:
    """Computes PROMPT in pieces and gives what is told of it, by position."""
    epoch = Epoch(make_executor(loaded), 1)
    new = [new_sequence(1, PROMPT, TABLE, asked, **fields)]
    told: dict[int, Any] = {}
    if company:
        other = SamplingParams(temperature=0.0, prompt_logprobs=7, logprobs=3)
        epoch.execute(new_sequences=(new_sequence(2, PROMPT[5:], range(11, 21), other),), work=[(2, 10)])
    for number, piece in enumerate(pieces):
        work = [(2, 3), (1, piece)] if company and number < 4 else [(1, piece)]
        result = epoch.execute(new_sequences=tuple(new), work=work)
        new = []
        for part in result.prompt_logprobs:
            if part.sequence_id == 1:
                told |= {part.first_position + i: one for i, one in enumerate(candidates_of(part.logprobs))}
            else:
                assert part.first_position == 11 + 3 * number
    return told


@pytest.mark.parametrize("num_best", [0, 3])
def test_a_prompt_is_told_as_transformers_sees_it(loaded: RunnableModel, num_best: int) -> None:
    told = tell_prompt(loaded, [len(PROMPT)], SamplingParams(prompt_logprobs=num_best))
    assert list(told) == list(range(1, len(PROMPT)))
    check_against(list(told.values()), PROMPT[1:], reference_logprobs(PROMPT)[:-1], num_best)


@pytest.mark.parametrize("name", ["loaded", "half"])
@pytest.mark.parametrize("company", [False, True])
def test_a_prompt_in_pieces_is_told_as_the_whole(
    name: str, company: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: RunnableModel = request.getfixturevalue(name)
    asked = SamplingParams(prompt_logprobs=5)
    whole = tell_prompt(model, [29], asked)
    assert len(whole) == 28
    for pieces in ([1] * 29, [28, 1], [1, 28], [8, 8, 8, 5], [13, 16]):
        assert tell_prompt(model, pieces, asked, company=company) == whole
    # As many rows at a time as a large vocabulary leaves.
    monkeypatch.setattr(steps, "MAX_PROMPT_LOGITS", 3 * model.config.vocab_size)
    assert tell_prompt(model, [20, 9], asked, company=company) == whole


def test_a_profile_counts_the_rows_of_a_prompt(loaded: RunnableModel) -> None:
    runner = model_runner.ModelRunner(loaded)
    num_rows = min(steps.MAX_PROMPT_ROWS, loaded.config.max_model_len)
    assert profile(runner, 8, num_rows, 1) >= 3 * num_rows * loaded.config.vocab_size * 4


def test_of_a_sequence_that_starts_anew_only_the_prompt_is_told(loaded: RunnableModel) -> None:
    whole = tell_prompt(loaded, [29], SamplingParams(prompt_logprobs=5))
    restarted = tell_prompt(loaded, [29], SamplingParams(prompt_logprobs=5), prompt_length=12)
    assert restarted == {position: whole[position] for position in range(1, 12)}
    in_pieces = tell_prompt(loaded, [11, 1, 17], SamplingParams(prompt_logprobs=5), prompt_length=12)
    assert in_pieces == restarted


def test_of_computed_tokens_nothing_is_told(loaded: RunnableModel) -> None:
    executor = make_executor(loaded)
    epoch = Epoch(executor, 1)
    asked = SamplingParams(prompt_logprobs=2)
    epoch.execute(new_sequences=(new_sequence(1, PROMPT, TABLE, asked),), work=[(1, 29)])
    result = epoch.execute(
        new_sequences=(new_sequence(2, PROMPT, TABLE, asked, num_computed_tokens=16),), work=[(2, 13)]
    )
    (piece,) = result.prompt_logprobs
    assert (piece.first_position, len(piece.logprobs)) == (17, 12)


def test_a_prompt_of_one_token_has_none(loaded: RunnableModel) -> None:
    epoch = Epoch(make_executor(loaded), 1)
    result = epoch.execute(
        new_sequences=(new_sequence(1, [9], TABLE, SamplingParams(prompt_logprobs=2, logprobs=1)),), work=[(1, 1)]
    )
    assert result.prompt_logprobs == ()
    assert result.logprob_sequence_ids == (1,)


def test_the_first_answer_of_a_group_tells_of_each_child(loaded: RunnableModel) -> None:
    epoch = Epoch(make_executor(loaded), 1)
    asked = SamplingParams(seed=3, temperature=2.0, logprobs=1, prompt_logprobs=1)
    parent = new_sequence(1, PROMPT, TABLE, asked)
    forks = tuple(ForkedRow(1, child, child, np.array(TABLE)) for child in (2, 3))
    result = epoch.execute(new_sequences=(parent,), forks=forks, work=[(1, 29), (2, 0), (3, 0)])
    assert result.logprob_sequence_ids == (1, 2, 3)
    told = candidates_of(result.logprobs)
    assert [one[0][0] for one in told] == list(result.token_ids)
    # The same logits: the best is the same.
    assert told[0][1] == told[1][1] == told[2][1]
    assert [piece.sequence_id for piece in result.prompt_logprobs] == [1]


async def test_they_arrive_over_the_wire(worker: WorkerDriver) -> None:
    stream = worker.open(1)
    asked = driver.sampling(logprobs=2, prompt_logprobs=0)
    new = [driver.new_sequence(4, PROMPT, TABLE, sampling=asked), driver.new_sequence(5, PROMPT[:4], [20])]
    response = await stream.step(new_sequences=new, sequence_ids=[5, 4], num_new_tokens=[4, 29])
    assert list(response.sequence_ids) == [5, 4]
    assert list(response.logprob_sequence_ids) == [4]
    assert list(response.logprobs.num_candidates) == [3]
    assert response.logprobs.token_ids[0] == response.logprobs.token_ids[1] == response.token_ids[1]
    assert list(response.logprobs.ranks) == [1, 1, 2]
    (piece,) = response.prompt_logprobs
    assert (piece.sequence_id, piece.first_position) == (4, 1)
    assert list(piece.logprobs.token_ids) == PROMPT[1:]
    assert list(piece.logprobs.num_candidates) == [1] * 28
    response = await stream.step(sequence_ids=[5], num_new_tokens=[1])
    assert not response.HasField("logprobs")
    assert not response.prompt_logprobs


async def test_more_than_may_be_asked_for_are_refused(worker: WorkerDriver) -> None:
    asked = sampling_pb2.SamplingParams(logprobs=21, prompt_logprobs=21)
    new = driver.new_sequence(4, PROMPT, TABLE, sampling=asked)
    error = await worker.open(1).failed(new_sequences=[new], sequence_ids=[4], num_new_tokens=[1])
    assert "sampling.logprobs" in error.message
    assert "sampling.prompt_logprobs" in error.message
