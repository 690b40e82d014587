"""A new sequence that is wrong by itself fails alone: the step is executed for all others."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.contract.pooling import Pooling, PoolingKind
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import BlockyardError, Reason
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from worker_service.models.loader import load_model
from worker_service.step import ForkedRow

if TYPE_CHECKING:
    from worker_service.step import NewRow, StepOutput
    from worker_service.steps.step_executor import StepExecutor

PROMPT = list(range(5, 25))
GREEDY = SamplingParams(temperature=0.0)
EPOCHS = itertools.count(1)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def executor() -> StepExecutor:
    loaded = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), lambda done, total: None)
    return make_executor(loaded)


@pytest.fixture
def epoch(executor: StepExecutor) -> Epoch:
    return Epoch(executor, next(EPOCHS))


def innocent(sampling: SamplingParams = GREEDY) -> NewRow:
    return new_sequence(1, PROMPT, (1, 2, 3, 4), sampling)


def wrong(sequence_id: int = 2, token_ids: Any = PROMPT, sampling: SamplingParams = GREEDY, **fields: Any) -> Any:
    return new_sequence(sequence_id, token_ids, (5, 6, 7, 8), sampling, **fields)


@pytest.fixture(scope="module")
def alone(executor: StepExecutor) -> list[int]:
    """The tokens of the innocent sequence by itself."""
    epoch = Epoch(executor, next(EPOCHS))
    first = epoch.execute(new_sequences=(innocent(),), work=[(1, 20)])
    return [*first.token_ids, *(epoch.execute(work=[(1, 1)]).token_ids[0] for _ in range(5))]


def failures(result: StepOutput) -> dict[int, BlockyardError]:
    assert result.refusal is None, result.refusal
    return dict(result.failures)


SAMPLING: list[tuple[str, Any]] = [
    ("temperature", -1.0),
    ("temperature", NAN),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", INF),
    ("presence_penalty", INF),
    ("frequency_penalty", NAN),
    ("repetition_penalty", 0.0),
    ("logit_bias", {384: 1.0}),
    ("logit_bias", {5: NAN}),
    ("allowed_token_ids", (2**30,)),
    ("bad_token_sequences", ((),)),
    ("bad_token_sequences", ((384,),)),
    ("logprobs", 21),
    ("prompt_logprobs", 2**32 - 1),
]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an id that the vocabulary ends before": ({"token_ids": [*PROMPT[:-1], 384]}, "token_ids"),
    "an id of 2^30": ({"token_ids": [*PROMPT[:-1], 2**30]}, "token_ids"),
    "the largest id": ({"token_ids": [*PROMPT[:-1], 2**32 - 1]}, "token_ids"),
    "no ids": ({"token_ids": []}, "token_ids"),
    "more ids than the model's length": ({"token_ids": [5] * 97}, "token_ids"),
    "a prompt longer than its ids": ({"prompt_length": 21}, "prompt_length"),
    "all computed": ({"num_computed_tokens": 20}, "num_computed_tokens"),
    "no sampling parameters": ({"has_sampling": False}, "sampling"),
    "more stop tokens than there are tokens": ({"stop_token_ids": tuple(range(500))}, "stop_token_ids"),
    "four billion candidates": ({"num_beam_candidates": 2**32 - 1}, "num_beam_candidates"),
    "an unknown adapter": ({"lora_id": 9}, "lora_id"),
    "numbers of a model that generates": ({"pooling": Pooling(PoolingKind.LAST)}, "pooling"),
    "an error of the codec": ({"rejection": BlockyardError(Reason.FIELD_INVALID, "sampling: too long")}, "sampling"),
    **{
        f"{name} {value}": ({"sampling": replace(GREEDY, **{name: value})}, f"sampling.{name}")
        for name, value in SAMPLING
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_it_fails_alone_and_the_others_of_its_step_go_on(epoch: Epoch, alone: list[int], name: str) -> None:
    fields, field = WRONG[name]
    result = epoch.execute(new_sequences=(wrong(**fields), innocent()), work=[(2, 20), (1, 20)])
    error = failures(result)[2]
    assert (error.reason, error.message.split(":")[0]) == (Reason.FIELD_INVALID, field)
    assert (result.sequence_ids, result.skipped_sequence_ids) == ((1,), ())
    # The step that was on its way when the scheduler heard of it.
    later = epoch.execute(work=[(1, 1), (2, 1)], appended_sequence_ids=(2,), appended_block_ids=np.array([9]))
    assert failures(later) == {2: error}
    assert later.skipped_sequence_ids == ()
    tokens = [*result.token_ids, *later.token_ids]
    tokens += epoch.execute(work=[(1, 1)], finished_sequence_ids=(2,)).token_ids
    # Its number may come again, like any that was finished.
    again = epoch.execute(new_sequences=(wrong(),), work=[(1, 1), (2, 20)])
    assert again.sequence_ids == (1, 2)
    tokens += again.token_ids[:1]
    assert tokens == alone[: len(tokens)]


@pytest.mark.parametrize("is_late", [False, True], ids=["in its step", "in the next step"])
def test_its_children_fail_with_it(epoch: Epoch, alone: list[int], is_late: bool) -> None:
    fork = {"forks": (ForkedRow(2, 3, 1, np.array([5, 6, 7, 9])),)}
    first = {"new_sequences": (wrong(token_ids=[*PROMPT[:-1], 2**30]), innocent())}
    if is_late:
        epoch.execute(**first, work=[(2, 10), (1, 20)])
        result = epoch.execute(**fork, work=[(1, 1), (2, 10), (3, 0)])
    else:
        result = epoch.execute(**first, **fork, work=[(2, 20), (3, 0), (1, 20)])
    assert {each: error.reason for each, error in failures(result).items()} == dict.fromkeys(
        (2, 3), Reason.FIELD_INVALID
    )
    assert (result.sequence_ids, result.skipped_sequence_ids) == ((1,), ())
    assert result.token_ids[0] in alone[:2]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"new_sequences": (new_sequence(2, PROMPT, (0, 6, 7), GREEDY),)}, "new_sequences[0].block_ids"),
        ({"new_sequences": (new_sequence(2, PROMPT, (5,), GREEDY, num_computed_tokens=9),)}, "num_computed_tokens"),
        ({"new_sequences": (wrong(1, token_ids=[2**30]),)}, "new_sequences[0].sequence_id"),
        ({"new_sequences": (wrong(token_ids=[2**30]), wrong())}, "new_sequences[1].sequence_id"),
        ({"work": [(77, 1)]}, "not known"),
    ],
)
def test_what_breaks_the_protocol_refuses_the_whole_step(epoch: Epoch, fields: dict[str, Any], told: str) -> None:
    epoch.execute(new_sequences=(innocent(),), work=[(1, 20)])
    refusal = epoch.answer(**fields).refusal
    assert refusal is not None
    assert told in refusal.message
