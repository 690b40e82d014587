"""Beams on the worker: candidates, ids that the scheduler chooses, and forks of both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from blockyard.contract.sampling import SamplingParams
from blockyard.errors import Reason
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service import driver
from tests.unit.worker_service.executor import Epoch, candidates_of, make_executor, new_sequence
from tests.unit.worker_service.rows import VOCAB, make_sampler, rows_of, sequence
from worker_service.models.loader import load_model
from worker_service.step import BlockPairs, ForkedRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.worker_service.driver import WorkerDriver
    from worker_service.models.loader import RunnableModel
    from worker_service.sampling.sampler import BeamCandidates
    from worker_service.step import NewRow, StepOutput

PROMPT = [(5 * place * place + 11) % 300 for place in range(12)]
Told = list[tuple[int, float]]


def told_of(result: StepOutput) -> dict[int, Told]:
    """The candidates of each beam of an answer."""
    rows = candidates_of(result.beam_candidates)
    assert not result.beam_candidates.ranks.size
    return {
        sequence_id: [(token_id, value) for token_id, value, _ in row]
        for sequence_id, row in zip(result.beam_sequence_ids, rows, strict=True)
    }


# The sampler


def beam(num_candidates: int = 4, **fields: Any) -> NewRow:
    return sequence(num_beam_candidates=num_candidates, **fields)


def candidates(logits: torch.Tensor, *sequences: NewRow) -> BeamCandidates:
    return make_sampler().candidates(logits.clone(), rows_of(*sequences))


def random_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_candidates_are_the_best_of_the_log_softmax() -> None:
    logits = random_logits(3)
    found = candidates_of(candidates(logits, beam(4), beam(1), beam(6)).logprobs)
    values, token_ids = torch.log_softmax(logits, -1).topk(6)
    for row, count in enumerate((4, 1, 6)):
        assert [token_id for token_id, _, _ in found[row]] == token_ids[row, :count].tolist()
        assert [value for _, value, _ in found[row]] == values[row, :count].tolist()


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [1500, 20]] = 1.0
    (found,) = candidates_of(candidates(logits, beam(5)).logprobs)
    assert [token_id for token_id, _, _ in found] == [20, 1500, 0, 1, 2]


def test_filters_and_temperature_do_not_count_and_edits_do() -> None:
    logits = random_logits(1)
    plain = candidates_of(candidates(logits, beam(8)).logprobs)
    assert candidates_of(candidates(logits, beam(8, temperature=0.2, top_k=1, top_p=0.1, min_p=0.9)).logprobs) == plain
    first, second = plain[0][0][0], plain[0][1][0]
    edited = beam(
        8,
        token_ids=[9, 3],
        bad_token_sequences=((3, first),),
        min_tokens=2,
        stop_token_ids=(second,),
        logit_bias={7: 30.0},
        presence_penalty=2.0,
    )
    (found,) = candidates_of(candidates(logits, edited).logprobs)
    expected = logits[0].clone()
    expected[[first, second]] = -math.inf
    expected[7] += 30
    expected[3] -= 2
    values, token_ids = torch.log_softmax(expected, -1).topk(8)
    assert [token_id for token_id, _, _ in found] == token_ids.tolist()
    assert [value for _, value, _ in found] == values.tolist()


def test_impossible_tokens_are_no_candidates() -> None:
    logits = random_logits(2)
    found = candidates(logits, beam(4, allowed_token_ids=(17,)), beam(4, allowed_token_ids=(3, 4, 5)))
    one, three = candidates_of(found.logprobs)
    assert one == [(17, 0.0, 0)]
    assert sorted(token_id for token_id, _, _ in three) == [3, 4, 5]
    assert sum(math.exp(value) for _, value, _ in three) == pytest.approx(1, abs=1e-6)


def test_no_more_candidates_than_tokens() -> None:
    (found,) = candidates_of(candidates(random_logits(1), beam(VOCAB + 50)).logprobs)
    assert sorted(token_id for token_id, _, _ in found) == list(range(VOCAB))


def test_a_row_that_is_not_finite_or_left_nothing_fails_alone() -> None:
    logits = random_logits(3)
    expected = candidates_of(candidates(logits, beam(), beam(), beam()).logprobs)
    logits[1, 4] = float("nan")
    found = candidates(logits, beam(), beam(), beam())
    assert found.failed.tolist() == [False, True, False]
    assert candidates_of(found.logprobs) == [expected[0], expected[2]]
    found = candidates(logits[:1], beam(allowed_token_ids=(3,), bad_token_sequences=((3,),)))
    assert found.failed.tolist() == [True]
    assert len(found.logprobs) == 0


# Through the network


@pytest.fixture(scope="module")
def loaded() -> RunnableModel:
    return load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), lambda done, total: None)


@pytest.fixture
def epoch(loaded: RunnableModel) -> Epoch:
    return Epoch(make_executor(loaded), 1)


@torch.no_grad()
def check_against_transformers(told: Told, token_ids: Sequence[int]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32).eval()
    values, best = torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0, -1], -1).topk(len(told))
    assert [token_id for token_id, _ in told] == best.tolist()
    assert [value for _, value in told] == pytest.approx(values.tolist(), abs=1e-4)


def new_beam(
    sequence_id: int,
    token_ids: Sequence[int],
    table: Sequence[int],
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> NewRow:
    fields = {"prompt_length": len(PROMPT), "num_beam_candidates": 6} | fields
    return new_sequence(sequence_id, token_ids, table, sampling or SamplingParams(), **fields)


def start(epoch: Epoch, **fields: Any) -> Told:
    """Starts beam 1 in blocks 1 to 5."""
    result = epoch.execute(new_sequences=(new_beam(1, PROMPT, range(1, 6), **fields),), work=[(1, len(PROMPT))])
    assert result.sequence_ids == ()
    return told_of(result)[1]


def alone(loaded: RunnableModel, token_ids: Sequence[int], **fields: Any) -> Told:
    """The candidates after these ids, computed at once."""
    epoch = Epoch(make_executor(loaded), 1)
    result = epoch.execute(new_sequences=(new_beam(1, token_ids, range(1, 6), **fields),), work=[(1, len(token_ids))])
    return told_of(result)[1]


def test_a_beam_is_told_of_and_not_sampled(epoch: Epoch, loaded: RunnableModel) -> None:
    told = start(epoch)
    check_against_transformers(told, PROMPT)
    output: list[int] = []
    for place in (3, 0, 5):
        output.append(told[place][0])
        result = epoch.execute(work=[(1, 1)], inputs=[(1, output[-1])])
        assert (result.sequence_ids, result.token_ids) == ((), ())
        told = told_of(result)[1]
        check_against_transformers(told, PROMPT + output)
        assert told == alone(loaded, PROMPT + output)


def test_a_prompt_in_pieces_is_told_of_at_its_end(epoch: Epoch, loaded: RunnableModel) -> None:
    first = epoch.execute(new_sequences=(new_beam(1, PROMPT, range(1, 6)),), work=[(1, 7)])
    assert first.beam_sequence_ids == ()
    assert told_of(epoch.execute(work=[(1, 5)]))[1] == alone(loaded, PROMPT)


def test_parent_and_children_get_their_own_ids(epoch: Epoch, loaded: RunnableModel) -> None:
    """A fork copies the row before the new id; its last block is copied before anything is written to it."""
    start(epoch)
    table = np.arange(1, 6)
    result = epoch.execute(
        forks=(ForkedRow(1, 2, 0, table), ForkedRow(1, 3, 0, table)),
        replaced_tables=((2, np.array([1, 12, 13])), (3, np.array([1, 22, 23]))),
        blocks_to_copy=BlockPairs(np.array([2, 2]), np.array([12, 22])),
        work=[(3, 1), (1, 1), (2, 1)],
        inputs=[(1, 50), (2, 60), (3, 70)],
    )
    assert result.beam_sequence_ids == (3, 1, 2)
    told = told_of(result)
    assert {key: told[key] for key in (1, 2, 3)} == {
        key: alone(loaded, [*PROMPT, token_id]) for key, token_id in ((1, 50), (2, 60), (3, 70))
    }
    # The children go on as beams, also where the parent is gone.
    result = epoch.execute(finished_sequence_ids=(1,), work=[(2, 1), (3, 1)], inputs=[(3, 71), (2, 61)])
    assert told_of(result) == {2: alone(loaded, [*PROMPT, 60, 61]), 3: alone(loaded, [*PROMPT, 70, 71])}


def test_a_child_takes_the_place_of_a_parent_that_dies(epoch: Epoch, loaded: RunnableModel) -> None:
    start(epoch)
    result = epoch.execute(
        forks=(ForkedRow(1, 2, 0, np.arange(1, 6)),), finished_sequence_ids=(1,), work=[(2, 1)], inputs=[(2, 8)]
    )
    assert told_of(result) == {2: alone(loaded, [*PROMPT, 8])}


def test_a_child_without_tokens_is_told_what_its_parent_is(epoch: Epoch) -> None:
    table = np.arange(1, 6)
    result = epoch.execute(
        new_sequences=(new_beam(1, PROMPT, table),), forks=(ForkedRow(1, 2, 0, table),), work=[(1, 12), (2, 0)]
    )
    told = told_of(result)
    assert told[1] == told[2]


def test_stop_tokens_do_not_end_a_beam(epoch: Epoch, loaded: RunnableModel) -> None:
    told = start(epoch, stop_token_ids=(50, 51))
    assert told == alone(loaded, PROMPT)
    for token_id in (50, 51, 50):
        result = epoch.execute(work=[(1, 1)], inputs=[(1, token_id)])
        assert result.skipped_sequence_ids == ()
        assert result.beam_sequence_ids == (1,)


def test_min_tokens_and_penalties_go_by_the_ids_that_were_chosen(epoch: Epoch, loaded: RunnableModel) -> None:
    plain = alone(loaded, PROMPT)
    asked = SamplingParams(
        frequency_penalty=1.5, repetition_penalty=1.3, bad_token_sequences=((60, 61), (plain[1][0],))
    )
    fields = {"sampling": asked, "min_tokens": 1, "stop_token_ids": (plain[0][0],)}
    told = start(epoch, **fields)
    assert not {token_id for token_id, _ in told} & {plain[0][0], plain[1][0]}
    output: list[int] = []
    for token_id in (60, 60, told[0][0], 60):
        output.append(token_id)
        told = told_of(epoch.execute(work=[(1, 1)], inputs=[(1, token_id)]))[1]
        assert told == alone(loaded, PROMPT + output, **fields)


def test_beams_and_samples_share_a_step_and_do_not_touch(loaded: RunnableModel) -> None:
    asked = SamplingParams(seed=7, logprobs=2, prompt_logprobs=1)
    lonely = Epoch(make_executor(loaded), 1)
    expected = lonely.execute(new_sequences=(new_sequence(9, PROMPT[3:], range(7, 10), asked),), work=[(9, 9)])
    epoch = Epoch(make_executor(loaded), 1)
    result = epoch.execute(
        new_sequences=(
            new_beam(1, PROMPT, range(1, 6), SamplingParams(prompt_logprobs=0, logprobs=3)),
            new_sequence(9, PROMPT[3:], range(7, 10), asked),
            new_beam(2, PROMPT[:5], range(20, 22), prompt_length=5),
        ),
        work=[(1, 12), (9, 9), (2, 5)],
    )
    assert (result.sequence_ids, result.token_ids) == ((9,), expected.token_ids)
    assert result.logprob_sequence_ids == (9,)
    assert candidates_of(result.logprobs) == candidates_of(expected.logprobs)
    told = told_of(result)
    assert list(told) == [1, 2]
    assert told[1] == alone(loaded, PROMPT)
    check_against_transformers(told[2], PROMPT[:5])
    assert [(piece.sequence_id, len(piece.logprobs)) for piece in result.prompt_logprobs] == [(1, 11), (9, 8)]


def test_a_beam_that_fails_is_skipped_from_then_on(epoch: Epoch) -> None:
    impossible = SamplingParams(allowed_token_ids=(3,), bad_token_sequences=((4, 3),))
    assert start(epoch, sampling=impossible) == [(3, 0.0)]
    result = epoch.execute(work=[(1, 1)], inputs=[(1, 4)])
    told = [(sequence_id, error.reason) for sequence_id, error in result.failures]
    assert (result.beam_sequence_ids, told) == ((), [(1, Reason.NO_TOKEN_POSSIBLE)])
    result = epoch.execute(work=[(1, 1)], inputs=[(1, 5)])
    assert result.skipped_sequence_ids == (1,)
    assert not result.failures


def test_a_sequence_ends_with_its_last_id_at_the_models_length(loaded: RunnableModel) -> None:
    epoch = Epoch(make_executor(loaded, max_model_len=len(PROMPT) + 1), 1)
    epoch.execute(new_sequences=(new_beam(1, PROMPT, range(1, 4)),), work=[(1, 12)])
    epoch.execute(work=[(1, 1)], inputs=[(1, 4)])
    refused = epoch.answer(work=[(1, 1)], inputs=[(1, 5)]).refusal
    assert refused is not None
    assert "computes past max_model_len" in refused.message


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no id": ({"work": [(1, 1)]}, "sequences [1]: computes more tokens than are known"),
    "not computed": ({"inputs": [(1, 5)]}, "sequence 1: the step does not compute one token of it"),
    "two tokens": ({"work": [(1, 2)], "inputs": [(1, 5)]}, "sequence 1: the step does not compute one token of it"),
    "unknown": ({"inputs": [(8, 5)]}, "input_sequence_ids: sequence 8 is not known"),
    "finished": (
        {"finished_sequence_ids": (1,), "inputs": [(1, 5)]},
        "input_sequence_ids: sequence 1 is not known",
    ),
    "twice": ({"work": [(1, 1)], "inputs": [(1, 5), (1, 6)]}, "input_sequence_ids: a sequence appears twice"),
    "beyond the vocabulary": ({"work": [(1, 1)], "inputs": [(1, 10**6)]}, "input_token_ids: token ids must be below"),
    "a sampled one": ({"work": [(2, 1)], "inputs": [(2, 5)]}, "sequence 2: its next token is known already"),
    "a child of a sampled one": (
        {"forks": (ForkedRow(2, 3, 1, np.array([7, 8])),), "work": [(3, 1)], "inputs": [(3, 5)]},
        "sequence 3: its next token is known already",
    ),
    "half a prompt": ({"work": [(4, 1)], "inputs": [(4, 5)]}, "sequence 4: its next token is known already"),
    "one that starts": (
        {"new_sequences": (new_beam(6, PROMPT, [30, 31]),), "work": [(6, 1)], "inputs": [(6, 5)]},
        "sequence 6: its next token is known already",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_id_that_is_not_the_next_is_refused(epoch: Epoch, name: str) -> None:
    start(epoch)
    epoch.execute(new_sequences=(new_sequence(2, PROMPT, [7, 8], SamplingParams()),), work=[(2, 12)])
    epoch.execute(new_sequences=(new_beam(4, PROMPT, [9, 10]),), work=[(4, 7)])
    fields, words = BAD[name]
    refused = epoch.answer(**fields).refusal
    assert refused is not None
    assert words in refused.message


def test_every_violation_is_told_at_once_and_nothing_changes(loaded: RunnableModel) -> None:
    executor = make_executor(loaded)
    epoch = Epoch(executor, 1)
    start(epoch)
    before = executor.batch.progress(1), executor.batch.token_ids(1).tolist()
    refused = epoch.answer(work=[(1, 2)], inputs=[(1, 10**6), (8, 3)]).refusal
    assert refused is not None
    for words in ("must be below", "sequence 8 is not known", "does not compute one token of it"):
        assert words in refused.message
    assert (executor.batch.progress(1), executor.batch.token_ids(1).tolist()) == before


async def test_they_arrive_over_the_wire(worker: WorkerDriver) -> None:
    stream = worker.open(1)
    new = driver.new_sequence(4, PROMPT, [1, 2, 3], num_beam_candidates=3)
    response = await stream.step(new_sequences=[new], sequence_ids=[4], num_new_tokens=[12])
    assert (list(response.sequence_ids), list(response.beam_sequence_ids)) == ([], [4])
    told = response.beam_candidates
    assert (list(told.num_candidates), list(told.ranks)) == ([3], [])
    check_against_transformers(list(zip(told.token_ids, told.logprobs, strict=True)), PROMPT)
    response = await stream.step(
        sequence_ids=[4], num_new_tokens=[1], input_sequence_ids=[4], input_token_ids=[told.token_ids[2]]
    )
    assert list(response.beam_sequence_ids) == [4]
    error = await stream.refused(sequence_ids=[4], num_new_tokens=[1], input_sequence_ids=[4])
    assert "input_token_ids" in error.message
