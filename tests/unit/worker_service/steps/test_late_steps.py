"""Steps that are launched before the tokens of those before them are known, and finished later.

The device computes when somebody waits for it (`tests.kit.kernels.late`): here, when no more steps may be launched.
"""

from __future__ import annotations

import itertools
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.contract.sampling import SamplingParams
from tests.kit.kernels.backends import BEST, Kernels, build_kernels
from tests.kit.kernels.hostile_drafts import HostileDrafts
from tests.kit.kernels.late import LateLauncher, make_late
from tests.kit.kernels.ranks import new_backend
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from worker_service.models import loader
from worker_service.models.loader import load_model
from worker_service.step import ForkedRow

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from worker_service.step import NewRow, StepOutput
    from worker_service.steps.step_executor import StepExecutor

NUM_OUTPUT = 8
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, temperature=0.9),
    SamplingParams(seed=6, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0}),
]
EPOCHS = itertools.count(1)


class LateExecutor:
    """An executor whose device is late, and one that computes at once, of the same model."""

    def __init__(self, model: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
        build_kernels()
        self.drafts = HostileDrafts([0, 1])
        self.prompt = self._make(model, monkeypatch)
        self.late = self._make(model, monkeypatch, depth)

    def _make(self, model: Path, monkeypatch: pytest.MonkeyPatch, depth: int = 1) -> StepExecutor:
        backend = new_backend(Kernels(BEST, torch.float32))
        self.launcher: LateLauncher | None = make_late(backend, depth) if depth > 1 else None
        monkeypatch.setattr(loader, "get_backend", lambda *_, **__: backend)
        loaded = load_model(model, torch.float32, torch.device("cpu"), lambda done, total: None)
        return make_executor(loaded, max_captured_tokens=20, drafting=self.drafts)

    def alone(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """A sequence's tokens, computed at once."""
        epoch = Epoch(self.prompt, next(EPOCHS))
        new = new_sequence(1, prompt, range(1, 8), sampling)
        steps = [
            {"new_sequences": (new,), "work": [(1, len(prompt))]},
            *({"work": [(1, 1)]} for _ in range(NUM_OUTPUT - 1)),
        ]
        return [token_id for step in steps for token_id in epoch.execute(**step).token_ids]


class Late:
    """An epoch of a late executor: steps go in, answers come when they must."""

    def __init__(self, executor: StepExecutor) -> None:
        self.executor = executor
        self.results: list[StepOutput] = []
        self._epoch = Epoch(executor, next(EPOCHS))

    def submit(self, **fields: Any) -> None:
        self._take(self.executor.submit(self._epoch.make(**fields), 0.0))

    def finish(self) -> None:
        self._take(self.executor.finish_all())

    def _take(self, finished: Iterable[tuple[Any, StepOutput]]) -> None:
        self.results += [result for _, result in finished]
        assert [result.step_id for result in self.results] == list(range(1, len(self.results) + 1))

    def outputs(self) -> dict[int, list[int]]:
        """The tokens of each sequence."""
        outputs: dict[int, list[int]] = {}
        for result in self.results:
            assert result.refusal is None, result.refusal
            token_ids, counts = iter(result.token_ids), result.num_tokens or (1,) * len(result.sequence_ids)
            for sequence_id, count in zip(result.sequence_ids, counts, strict=True):
                outputs.setdefault(sequence_id, []).extend(islice(token_ids, count))
            assert next(token_ids, None) is None
        return outputs


@pytest.fixture(params=[2, 3])
def executors(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> LateExecutor:
    return LateExecutor(model, request.param, monkeypatch)


def prompt_of(number: int) -> list[int]:
    return [3 + number, 17, 5 * number + 2, 40][: 2 + number % 3]


def blocks_of(number: int) -> range:
    return range(2 * number + 1, 2 * number + 3)


def test_a_sequence_may_end_at_any_place_while_later_steps_are_launched(executors: LateExecutor) -> None:
    sequences = {number: (prompt_of(number), SAMPLINGS[number % 4]) for number in range(NUM_OUTPUT)}
    truth = {number: executors.alone(*sequence) for number, sequence in sequences.items()}
    # The first place at which the token that ends it stands.
    ends = {number: output.index(output[number]) for number, output in truth.items()}
    late = Late(executors.late)
    new = tuple(
        new_sequence(number, prompt, blocks_of(number), sampling, stop_token_ids=[truth[number][number]])
        for number, (prompt, sampling) in sequences.items()
    )
    late.submit(new_sequences=new, work=[(number, len(prompt)) for number, (prompt, _) in sequences.items()])
    for _ in range(NUM_OUTPUT - 1):
        late.submit(work=[(number, 1) for number in sequences])
    late.finish()
    assert executors.launcher is not None
    assert executors.launcher.most == executors.late._depth
    assert late.outputs() == {number: output[: ends[number] + 1] for number, output in truth.items()}
    for place, result in enumerate(late.results):
        assert set(result.skipped_sequence_ids) == {number for number in sequences if ends[number] < place}


def test_a_step_that_may_draft_waits_for_those_before_it(executors: LateExecutor) -> None:
    """Sequences that end meanwhile, at their length or at a stop token, compute nothing in what was launched."""
    sequences = {number: (prompt_of(number), SAMPLINGS[number % 4]) for number in range(4)}
    truth = {number: executors.alone(*sequence) for number, sequence in sequences.items()}
    executors.drafts.texts = [prompt_of(number) + output for number, output in truth.items()]
    late = Late(executors.late)
    new = tuple(
        new_sequence(
            number, prompt, range(3 * number + 1, 3 * number + 4), sampling, max_length=len(prompt) + NUM_OUTPUT
        )
        for number, (prompt, sampling) in sequences.items()
    )
    late.submit(new_sequences=new, work=[(number, len(prompt)) for number, (prompt, _) in sequences.items()])
    for place in range(NUM_OUTPUT):
        drafts = {"max_draft_tokens": np.array([3, 0, 4, 2])} if place % 3 == 1 else {}
        late.submit(work=[(number, 1) for number in sequences], **drafts)
    late.finish()
    assert late.outputs() == truth
    assert sum(result.num_accepted_tokens for result in late.results) > 0
    assert sum(len(result.skipped_sequence_ids) for result in late.results) > 0


def test_a_row_that_changes_hands_meanwhile_gives_each_its_own(executors: LateExecutor) -> None:
    truth = [executors.alone(prompt_of(number), SAMPLINGS[0]) for number in range(3)]
    late = Late(executors.late)

    def new(number: int) -> NewRow:
        return new_sequence(number, prompt_of(number), blocks_of(number), SAMPLINGS[0])

    # Its second token ends it; that it is not known yet when its row is another's already.
    first = new_sequence(0, prompt_of(0), blocks_of(0), SAMPLINGS[0], stop_token_ids=[truth[0][1]])
    late.submit(new_sequences=(first,), work=[(0, 2)])
    late.submit(work=[(0, 1)])
    for number in (1, 2):
        prompt_length = len(prompt_of(number))
        late.submit(finished_sequence_ids=(number - 1,), new_sequences=(new(number),), work=[(number, prompt_length)])
    for _ in range(3):
        late.submit(work=[(2, 1)])
    late.finish()
    assert late.outputs() == {0: truth[0][:2], 1: truth[1][:1], 2: truth[2][:4]}


def test_what_needs_tokens_on_the_host_waits_for_them(executors: LateExecutor) -> None:
    plain = executors.alone(prompt_of(1), SAMPLINGS[0])
    companion = executors.alone(prompt_of(0), SAMPLINGS[1])
    for asks in (
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0),
        SamplingParams(temperature=0.0, grammar="start: /[a-z ]{200}/"),
        SamplingParams(temperature=0.0, bad_token_sequences=((plain[0], plain[1]), (plain[1], plain[2]))),
    ):
        truth = executors.alone(prompt_of(1), asks)
        assert (truth == plain) == (asks.logprobs is not None)
        late = Late(executors.late)
        late.submit(new_sequences=(new_sequence(0, prompt_of(0), blocks_of(0), SAMPLINGS[1]),), work=[(0, 2)])
        late.submit(work=[(0, 1)])
        late.submit(new_sequences=(new_sequence(1, prompt_of(1), blocks_of(1), asks),), work=[(0, 1), (1, 3)])
        for _ in range(3):
            late.submit(work=[(0, 1), (1, 1)])
        late.submit(finished_sequence_ids=(1,), work=[(0, 1)])
        late.submit(work=[(0, 1)])
        late.finish()
        assert late.outputs() == {0: companion, 1: truth[:4]}
        told = [result.logprob_sequence_ids for result in late.results]
        assert told == [(), (), *[(1,) if asks.logprobs else ()] * 4, (), ()]


def test_a_fork_of_a_sequence_whose_token_is_not_known_waits_for_it(executors: LateExecutor) -> None:
    prompt = prompt_of(2)
    truth = executors.alone(prompt, SAMPLINGS[0])
    late = Late(executors.late)
    late.submit(new_sequences=(new_sequence(0, prompt, [1], SAMPLINGS[0]),), work=[(0, len(prompt))])
    late.submit(work=[(0, 1)])
    # The child stays behind, with its parent's last token as its own.
    late.submit(forks=(ForkedRow(0, 1, 0, np.array([1])),), work=[(0, 1)])
    late.submit(work=[(0, 1)])
    late.submit(work=[(1, 1)])
    late.finish()
    assert late.outputs() == {0: truth[:4], 1: truth[2:3]}


def test_a_sequence_that_is_rejected_fails_behind_what_was_launched_and_the_others_go_on(
    executors: LateExecutor,
) -> None:
    truth = executors.alone(prompt_of(0), SAMPLINGS[0])
    late = Late(executors.late)
    good = new_sequence(0, prompt_of(0), blocks_of(0), SAMPLINGS[0])
    wrong = new_sequence(1, [2**30], blocks_of(1), SAMPLINGS[0])
    late.submit(new_sequences=(good,), work=[(0, len(prompt_of(0)))])
    late.submit(new_sequences=(wrong,), work=[(0, 1), (1, 1)])
    late.submit(work=[(0, 1), (1, 1)])
    # Forgotten before the step that failed it is finished.
    late.submit(work=[(0, 1)], finished_sequence_ids=(1,))
    late.finish()
    assert late.outputs() == {0: truth[:4]}
    assert [[each for each, _ in result.failures] for result in late.results] == [[], [1], [1], []]
    assert not any(result.skipped_sequence_ids for result in late.results)


def test_a_refusal_comes_behind_what_was_launched(executors: LateExecutor) -> None:
    late = Late(executors.late)
    late.submit(new_sequences=(new_sequence(0, [5, 6], [1], SAMPLINGS[0]),), work=[(0, 2)])
    late.submit(work=[(0, 1)])
    late.submit(work=[(77, 1)])
    late.submit(work=[(0, 1)])
    assert [result.refusal is None for result in late.results] == [True, True, False, False]


def test_what_breaks_on_the_device_refuses_its_step_and_all_later_ones(
    executors: LateExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(executors.late)
    late.submit(new_sequences=(new_sequence(0, [5, 6], [1], SAMPLINGS[0]),), work=[(0, 2)])
    late.finish()

    def break_down(*_: object) -> np.ndarray:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(executors.late.runner, "_compute", break_down)
    late.submit(work=[(0, 1)])
    late.submit(work=[(0, 1)])
    late.finish()
    refusals = [result.refusal for result in late.results]
    assert refusals[0] is None
    assert [refusal is not None and refusal.reason.name for refusal in refusals[1:]] == ["BUG", "WRONG_STATE"]
    # Another epoch begins with nothing of it.
    monkeypatch.undo()
    again = Late(executors.late)
    again.submit(new_sequences=(new_sequence(0, prompt_of(0), [1], SAMPLINGS[0]),), work=[(0, 2)])
    again.finish()
    assert again.outputs()[0] == executors.alone(prompt_of(0), SAMPLINGS[0])[:1]
