"""Bad words and allowed token ids: against their definition, and in the order of the other edits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import Reason, from_status
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service import driver
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from tests.unit.worker_service.rows import VOCAB, make_sampler, rows_of, sequence
from worker_service.models.loader import load_model
from worker_service.sampling.sampling_state import BadWords
from worker_service.step import BlockPairs, ForkedRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.worker_service.driver import WorkerDriver
    from worker_service.models.loader import RunnableModel
    from worker_service.sampling.sampler import Sampled
    from worker_service.step import NewRow

NUM_OUTPUT = 12
few_ids = st.integers(0, 4)


def completing_by_definition(words: Sequence[Sequence[int]], output: Sequence[int], vocab_size: int) -> set[int]:
    """The tokens after which a word stands at the end of the output."""
    return {
        token_id for token_id in range(vocab_size) for word in words if [*output, token_id][-len(word) :] == list(word)
    }


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.lists(few_ids, min_size=1, max_size=4), max_size=6),
    output=st.lists(few_ids, max_size=8),
    vocab_size=st.integers(3, 5),
)
def test_what_would_complete_a_word_is_what_the_definition_says(
    words: list[list[int]], output: list[int], vocab_size: int
) -> None:
    bad = BadWords(words, vocab_size)
    output = [token_id for token_id in output if token_id < vocab_size]
    for dtype in (np.int32, np.int64):
        found = bad.completing(np.array(output, dtype))
        assert set(found.tolist()) == completing_by_definition(words, output, vocab_size)
        assert found.dtype == np.int64


def test_words_that_cannot_complete_are_none_at_all() -> None:
    assert not BadWords([], 100)
    assert not BadWords([[100], [3, 100], [2**31, 3]], 100)
    assert BadWords([[100], [99]], 100)


def sampled(logits: torch.Tensor, *sequences: NewRow) -> Sampled:
    return make_sampler().sample(logits.clone(), rows_of(*sequences))


def logits_with(**best: float) -> torch.Tensor:
    """Zeros, but for some tokens: t5=2.0 gives token 5 a logit of 2."""
    logits = torch.zeros(1, VOCAB)
    for name, value in best.items():
        logits[0, int(name[1:])] = value
    return logits


def greedy(logits: torch.Tensor, token_ids: list[int], prompt_length: int = 1, **fields: Any) -> int:
    found = sampled(logits, sequence(token_ids, prompt_length, temperature=0.0, **fields))
    assert not found.failed.any()
    return int(found.token_ids[0])


def test_the_last_token_of_a_word_is_masked_where_the_rest_stands_in_the_output() -> None:
    logits = logits_with(t5=3.0, t6=2.0)
    words = ((8, 9, 5),)
    assert greedy(logits, [1, 8, 9], bad_token_sequences=words) == 6
    assert greedy(logits, [1, 9, 8], bad_token_sequences=words) == 5
    assert greedy(logits, [1, 8, 9, 9], bad_token_sequences=words) == 5


def test_the_prompt_does_not_count() -> None:
    logits = logits_with(t5=3.0, t6=2.0)
    assert greedy(logits, [1, 8, 9], 2, bad_token_sequences=((8, 9, 5),)) == 5
    assert greedy(logits, [1, 8, 9], 3, bad_token_sequences=((9, 5),)) == 5


def test_a_word_of_one_token_never_comes_and_one_longer_than_the_text_does_no_harm() -> None:
    logits = logits_with(t5=3.0, t6=2.0)
    assert greedy(logits, [1], bad_token_sequences=((5,),)) == 6
    assert greedy(logits, [1, 9], bad_token_sequences=((8, 9, 5), (7, 8, 9, 5))) == 5


def test_only_allowed_tokens_are_chosen() -> None:
    logits = logits_with(t5=3.0, t6=2.0, t7=1.0)
    assert greedy(logits, [1], allowed_token_ids=(7, 6, 1999, 7)) == 6
    for seed in range(5):
        one = sequence(seed=seed, temperature=5.0, allowed_token_ids=(1234,))
        assert sampled(logits, one).token_ids.tolist() == [1234]
    some = [sequence(seed=seed, temperature=9.0, allowed_token_ids=(3, 4, 5), top_k=2) for seed in range(40)]
    assert set(sampled(logits.expand(40, -1), *some).token_ids.tolist()) == {3, 5}


def test_allowed_ids_come_first_then_bad_words_then_min_tokens_then_the_bias() -> None:
    logits = logits_with(t5=9.0)
    edits: dict[str, Any] = {
        "allowed_token_ids": (5, 6, 7, 8),
        "bad_token_sequences": ((5,),),
        "min_tokens": 2,
        "stop_token_ids": (6,),
        "logit_bias": {4: 100.0, 5: 100.0, 6: 100.0, 8: 1.0},
    }
    assert greedy(logits, [1], **edits) == 8
    # The bias lifts the penalized one again, if it comes first: 8 -> (0 + 1) / 9.
    assert greedy(logits_with(t7=0.5), [1, 8], repetition_penalty=9.0, **edits) == 7
    assert greedy(logits, [1, 9, 9], **edits) == 6


@pytest.mark.parametrize(
    "edits",
    [
        {"allowed_token_ids": (5,), "bad_token_sequences": ((5,),)},
        {"allowed_token_ids": (5, 6), "min_tokens": 1, "stop_token_ids": (5, 6)},
        {"bad_token_sequences": tuple((token_id,) for token_id in range(VOCAB))},
    ],
)
def test_a_row_that_is_left_nothing_fails_alone(edits: dict[str, Any]) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    plain = sequence(seed=1, allowed_token_ids=(3, 5, 8))
    found = sampled(logits, plain, sequence(seed=2, **edits), plain)
    assert found.failed.tolist() == [False, True, False]
    assert found.token_ids[[0, 2]].tolist() == sampled(logits[[0, 2]], plain, plain).token_ids.tolist()


# Through the network


@pytest.fixture(scope="module")
def loaded() -> RunnableModel:
    return load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), lambda done, total: None)


PROMPT = [5, 17, 3, 42, 8, 9]


def generate(loaded: RunnableModel, sampling: SamplingParams, known: Sequence[int] = ()) -> list[int]:
    """Generates until there are NUM_OUTPUT tokens, going on from those that are known."""
    epoch = Epoch(make_executor(loaded), 1)
    output = list(known)
    token_ids = PROMPT + output
    new = (new_sequence(1, token_ids, range(1, 6), sampling, prompt_length=len(PROMPT)),)
    fields: dict[str, Any] = {"new_sequences": new, "work": [(1, len(token_ids))]}
    while len(output) < NUM_OUTPUT:
        output += epoch.execute(**fields).token_ids
        fields = {"work": [(1, 1)]}
    return output


def forbid(output: list[int]) -> tuple[tuple[int, ...], ...]:
    """Words that a generation is full of."""
    return tuple(tuple(output[start : start + length]) for start, length in ((0, 1), (2, 2), (4, 3), (8, 4)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_generation_has_a_bad_word_and_a_restart_changes_nothing(loaded: RunnableModel, temperature: float) -> None:
    plain = SamplingParams(temperature=temperature, seed=3)
    words: tuple[tuple[int, ...], ...] = ()
    for _ in range(3):
        asked = SamplingParams(temperature=temperature, seed=3, bad_token_sequences=words)
        output = generate(loaded, asked)
        found = {tuple(output[start:end]) for end in range(NUM_OUTPUT + 1) for start in range(end)}
        assert not found & set(words)
        for cut in range(1, NUM_OUTPUT, 3):
            assert generate(loaded, asked, output[:cut]) == output
        words += forbid(output)
    assert output != generate(loaded, plain)


def test_a_child_has_its_parents_bad_words_and_its_own_output(loaded: RunnableModel) -> None:
    params = SamplingParams(seed=4, temperature=1.5)
    words = forbid(generate(loaded, params))
    asked = SamplingParams(seed=4, temperature=1.5, bad_token_sequences=words)
    epoch = Epoch(make_executor(loaded), 1)
    table = np.arange(1, 6)
    parent = new_sequence(1, PROMPT, table, asked)
    result = epoch.execute(new_sequences=(parent,), forks=(ForkedRow(1, 2, 1, table),), work=[(1, 6), (2, 0)])
    outputs = [[token_id] for token_id in result.token_ids]
    # The child goes on in a copy of the block that both would write to.
    fields: dict[str, Any] = {
        "replaced_tables": ((2, np.arange(7, 12)),),
        "blocks_to_copy": BlockPairs(np.array([1]), np.array([7])),
    }
    for _ in range(NUM_OUTPUT - 1):
        result = epoch.execute(work=[(1, 1), (2, 1)], **fields)
        for output, token_id in zip(outputs, result.token_ids, strict=True):
            output.append(token_id)
        fields = {}
    assert outputs[0] == generate(loaded, asked)
    for output in outputs:
        found = {tuple(output[start:end]) for end in range(NUM_OUTPUT + 1) for start in range(end)}
        assert not found & set(words)


async def test_what_cannot_be_kept_to_is_refused(worker: WorkerDriver) -> None:
    asked = sampling_pb2.SamplingParams(
        allowed_token_ids=[3, 10**6], bad_token_sequences=[{"token_ids": [3]}, {"token_ids": []}]
    )
    new = driver.new_sequence(4, PROMPT, [1], sampling=asked)
    error = await worker.open(1).failed(new_sequences=[new], sequence_ids=[4], num_new_tokens=[1])
    assert "sampling.allowed_token_ids" in error.message
    assert "sampling.bad_token_sequences" in error.message


async def test_they_arrive_over_the_wire(worker: WorkerDriver) -> None:
    stream = worker.open(1)
    asked = driver.sampling(allowed_token_ids=[7, 11], bad_token_sequences=[{"token_ids": [7, 7]}, {"token_ids": [11]}])
    step: dict[str, Any] = {"new_sequences": [driver.new_sequence(4, PROMPT, [1, 2], sampling=asked)]}
    assert await stream.sampled(sequence_ids=[4], num_new_tokens=[6], **step) == {4: 7}
    await stream.send(sequence_ids=[4], num_new_tokens=[1])
    response = await stream.answer()
    assert [failure.sequence_id for failure in response.failures] == [4]
    assert from_status(response.failures[0].status).reason is Reason.NO_TOKEN_POSSIBLE
