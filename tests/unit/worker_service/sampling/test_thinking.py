"""Budgets of reasoning: against their definition, beside all other edits, and through the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.sampling import SamplingParams, ThinkingTokens
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service import driver
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from tests.unit.worker_service.rows import VOCAB, make_sampler, rows_of, sequence
from worker_service.models.loader import load_model
from worker_service.sampling.thinking import ThinkingState
from worker_service.step import BlockPairs, ForkedRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.worker_service.driver import WorkerDriver
    from worker_service.models.loader import RunnableModel

END, BEGIN = 4, 3
PROMPT = [5, 17, 3, 42, 8, 9]
NUM_OUTPUT = 12


def must_end(budget: int, tokens: ThinkingTokens, output: Sequence[int]) -> bool:
    """Returns whether reasoning must end behind an output, from the whole of it."""
    spans: list[list[int]] = [[]] if tokens.is_open else []
    is_open, place = tokens.is_open, 0
    while place < len(output):
        if is_open:
            if output[place] == tokens.end_token_id:
                is_open = False
                if not tokens.begins_anywhere:
                    return False
            else:
                spans[-1].append(output[place])
            place += 1
            continue
        ends = [place + 1 + extra for extra in range(3)]
        fitting = [end for end in ends if end <= len(output) and tuple(output[place:end]) in tokens.begins]
        if fitting:
            is_open, place = True, fitting[0]
            spans.append([])
        elif not tokens.begins_anywhere:
            return False
        else:
            place += 1
    return is_open and sum(map(len, spans)) >= budget


# No sequence is the end of another, so that what begins reasoning is clear.
BEGINS = st.sampled_from([((3,),), ((3, 2),), ((0, 3), (1, 3)), ((3, 2, 1),), ()])


@settings(max_examples=500, deadline=None)
@given(
    budget=st.integers(0, 5),
    begins=BEGINS,
    is_open=st.booleans(),
    anywhere=st.booleans(),
    output=st.lists(st.integers(0, 4), max_size=14),
    cut=st.integers(0, 14),
)
def test_it_must_end_where_the_definition_says(
    budget: int, begins: Any, is_open: bool, anywhere: bool, output: list[int], cut: int
) -> None:
    tokens = ThinkingTokens(END, begins, is_open, anywhere)
    grown = ThinkingState(budget, tokens, output[:cut])
    twin = grown.copy()
    for place in range(cut, len(output)):
        grown.add(output[place])
    expected = must_end(budget, tokens, output)
    for state in (grown, ThinkingState(budget, tokens, output)):
        assert (state.forced_token_ids is not None) is expected
    assert (twin.forced_token_ids is not None) is must_end(budget, tokens, output[:cut])
    if expected:
        assert grown.forced_token_ids is not None
        assert grown.forced_token_ids.tolist() == [END]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "edits",
    [
        {"logit_bias": {END: -100.0, 9: 100.0}},
        {"allowed_token_ids": (7, 9)},
        {"bad_token_sequences": ((END,),)},
        {"repetition_penalty": 5.0, "frequency_penalty": 2.0},
        {"top_k": 1, "top_p": 0.01, "min_p": 1.0},
        {"logprobs": 2},
    ],
)
def test_its_end_wins_over_every_other_edit(edits: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    thinking = {"thinking_token_budget": 2, "thinking_tokens": ThinkingTokens(END, is_open=True)}
    asked = {"temperature": temperature, "seed": 5, **edits}
    free = sequence([1, 8], **asked, **thinking)
    spent = sequence([1, 8, 8], stop_token_ids=(END,), min_tokens=9, **asked, **thinking)
    plain = sequence([1, 8, 8], **asked)
    sampled = make_sampler().sample(logits.clone(), rows_of(free, spent, plain))
    assert not sampled.failed.any()
    assert sampled.token_ids[1] == END
    alone = make_sampler().sample(logits[[0, 2]].clone(), rows_of(sequence([1, 8], **asked), plain))
    assert sampled.token_ids[[0, 2]].tolist() == alone.token_ids.tolist()
    if "logprobs" in edits:
        expected = torch.log_softmax(logits[1], -1)[END]
        assert sampled.logprobs.logprobs[3] == pytest.approx(float(expected), abs=1e-4)


@pytest.fixture(scope="module")
def loaded() -> RunnableModel:
    return load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), lambda done, total: None)


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_reasoning_ends_in_time_and_a_restart_changes_nothing(
    loaded: RunnableModel, temperature: float, budget: int
) -> None:
    plain = generate(loaded, SamplingParams(temperature=temperature, seed=3))
    assert END not in plain
    tokens = ThinkingTokens(END, is_open=True)
    asked = SamplingParams(temperature=temperature, seed=3, thinking_token_budget=budget, thinking_tokens=tokens)
    output = generate(loaded, asked)
    assert output[: budget + 1] == [*plain[:budget], END]
    assert END not in output[budget + 1 :]
    for cut in range(1, NUM_OUTPUT, 2):
        assert generate(loaded, asked, output[:cut]) == output


def test_a_child_has_a_budget_of_its_own(loaded: RunnableModel) -> None:
    tokens = ThinkingTokens(END, is_open=True)
    asked = SamplingParams(seed=4, temperature=1.5, thinking_token_budget=3, thinking_tokens=tokens)
    epoch = Epoch(make_executor(loaded), 1)
    table = np.arange(1, 6)
    parent = new_sequence(1, PROMPT, table, asked)
    result = epoch.execute(new_sequences=(parent,), forks=(ForkedRow(1, 2, 1, table),), work=[(1, 6), (2, 0)])
    outputs = [[token_id] for token_id in result.token_ids]
    fields: dict[str, Any] = {
        "replaced_tables": ((2, np.arange(7, 12)),),
        "blocks_to_copy": BlockPairs(np.array([1]), np.array([7])),
    }
    for _ in range(5):
        for output, token_id in zip(outputs, epoch.execute(work=[(1, 1), (2, 1)], **fields).token_ids, strict=True):
            output.append(token_id)
        fields = {}
    assert [output.index(END) for output in outputs] == [3, 3]
    assert outputs[0] != outputs[1]


async def test_what_is_no_token_is_refused(worker: WorkerDriver) -> None:
    wrongs = (
        sampling_pb2.ThinkingTokens(end_token_id=10**6),
        sampling_pb2.ThinkingTokens(begins=[{"token_ids": [10**6]}]),
        sampling_pb2.ThinkingTokens(begins=[{"token_ids": []}]),
    )
    for epoch, wrong in enumerate(wrongs, 1):
        asked = sampling_pb2.SamplingParams(thinking_token_budget=1, thinking_tokens=wrong)
        new = driver.new_sequence(4, PROMPT, [1], sampling=asked)
        error = await worker.open(epoch).failed(new_sequences=[new], sequence_ids=[4], num_new_tokens=[1])
        assert "sampling.thinking_tokens" in error.message


async def test_it_arrives_over_the_wire(worker: WorkerDriver) -> None:
    stream = worker.open(1)
    asked = driver.sampling(thinking_token_budget=0, thinking_tokens={"end_token_id": END, "is_open": True})
    step: dict[str, Any] = {"new_sequences": [driver.new_sequence(4, PROMPT, [1, 2], sampling=asked)]}
    assert await stream.sampled(sequence_ids=[4], num_new_tokens=[6], **step) == {4: END}
