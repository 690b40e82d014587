"""Drafts in steps: whatever is drafted, every sequence gets what it gets token by token, to the last bit."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from blockyard.contract.sampling import SamplingParams, ThinkingTokens
from blockyard.errors import Reason
from blockyard_kernels.suffixes import HostDrafting
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels, build_kernels
from tests.kit.kernels.hostile_drafts import HostileDrafts
from tests.kit.kernels.ranks import new_backend
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.unit.worker_service.executor import (
    MAX_DRAFT_ROWS,
    MAX_DRAFT_TOKENS,
    Epoch,
    candidates_of,
    make_executor,
    new_sequence,
)
from tests.unit.worker_service.ranks_executor import RanksExecutor
from worker_service.models import loader
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.contract.parallel import Parallel
    from blockyard_kernels.drafting import DraftingOps, DraftRows, Drafts
    from worker_service.models.loader import RunnableModel
    from worker_service.step import NewRow, StepOutput
    from worker_service.steps.rank_steps import RankSteps
    from worker_service.steps.step_executor import StepExecutor

PROMPT_LENGTH, MAX_LENGTH, NUM_BLOCKS = 11, 48, 7
STOP = 5
# A token whose row of the embedding is not finite, in some models.
SPOILED = 77
# What a sequence may ask for, by name.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.8, "seed": 2**63 + 5, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {7: 2.0, STOP: 3.0}, "presence_penalty": 0.5, "temperature": 1.0, "seed": 5},
    "bad words": {"bad_token_sequences": ((9,), (30, 31), (8, 8)), "temperature": 1.5, "seed": 6},
    "few tokens": {"allowed_token_ids": (STOP, 6, 7, 8), "temperature": 2.0, "seed": 7},
    "log probabilities": {"logprobs": 3, "temperature": 1.0, "seed": 8},
    "log probabilities of edits": {"logprobs": 2, "repetition_penalty": 1.2, "temperature": 0.7, "seed": 9},
    "thinking": {
        "thinking_token_budget": 5,
        "thinking_tokens": ThinkingTokens(end_token_id=40, begins=((50,),), is_open=True),
        "temperature": 1.0,
        "seed": 10,
    },
    "grammar": {"grammar": 'start: /[a-f]{3}/ " is fixed, " /[0-9]+/', "temperature": 1.0, "seed": 11},
}


@dataclass
class Told:
    """What was told of a sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    failure: tuple[Reason, str] | None = None
    has_ended: bool = False


@cache
def load(kernels: str, folder: Path | None = None, dtype: torch.dtype = torch.float32) -> RunnableModel:
    if kernels != REFERENCE:
        build_kernels()
    return load_model(folder or tiny_model("llama"), dtype, torch.device("cpu"), lambda _, __: None, kernels)


def prompt_of(number: int) -> list[int]:
    chooser = random.Random(number)
    ids = [each for each in range(VOCAB_SIZE) if each != SPOILED]
    return [*chooser.choices(ids, k=PROMPT_LENGTH - 1), 4 + number]


def make_sequences(kinds: dict[str, dict[str, Any]], max_length: int = MAX_LENGTH, **fields: Any) -> list[NewRow]:
    """Makes a sequence of each kind, which ends at a stop token behind some."""
    common = {"stop_token_ids": (STOP, 1), "min_tokens": 3, "max_length": max_length} | fields
    return [
        new_sequence(
            number,
            prompt_of(number),
            range(1 + NUM_BLOCKS * number, 1 + NUM_BLOCKS * (number + 1)),
            SamplingParams(**asked),
            **common,
        )
        for number, asked in enumerate(kinds.values())
    ]


class Run:
    """Runs sequences to their end, and keeps what is told of them."""

    def __init__(self, executor: StepExecutor | RanksExecutor, sequences: list[NewRow], epoch: int = 1) -> None:
        self._epoch = Epoch(executor, epoch)
        self._sequences = sequences
        self.told = {each.sequence_id: Told() for each in sequences}
        self.num_drafted = self.num_accepted = self.num_again = 0

    def token_by_token(self) -> dict[int, Told]:
        return self._to_the_end(None)

    def with_drafts(self, seed: int, prices: tuple[int, ...] = ()) -> dict[int, Told]:
        return self._to_the_end(random.Random(seed), prices)

    def _to_the_end(self, chooser: random.Random | None, prices: tuple[int, ...] = ()) -> dict[int, Told]:
        work = [(each.sequence_id, len(each.token_ids)) for each in self._sequences]
        self._take(self._epoch.execute(new_sequences=tuple(self._sequences), work=work))
        while live := [sequence_id for sequence_id, told in self.told.items() if not told.has_ended]:
            fields = {} if chooser is None else self._allow(live, chooser, prices)
            self._take(self._epoch.execute(work=[(sequence_id, 1) for sequence_id in live], **fields))
        return self.told

    def _allow(self, live: list[int], chooser: random.Random, prices: tuple[int, ...]) -> dict[str, Any]:
        """Lets some of the sequences draft, within their lengths."""
        if chooser.random() < 0.1:
            return {}
        left, allowed = MAX_DRAFT_ROWS, []
        for sequence_id in live:
            length = PROMPT_LENGTH + len(self.told[sequence_id].token_ids)
            most = max(0, min(MAX_DRAFT_TOKENS, left, NUM_BLOCKS * 8 - length))
            allowed.append(chooser.choice((0, most, most, chooser.randint(0, most))))
            left -= allowed[-1]
        return {"max_draft_tokens": np.array(allowed), "draft_prices": np.array(prices, np.int64)}

    def _take(self, answer: StepOutput) -> None:
        counts = answer.num_tokens or (1,) * len(answer.sequence_ids)
        assert sum(counts) == len(answer.token_ids)
        token_ids = iter(answer.token_ids)
        for sequence_id, count in zip(answer.sequence_ids, counts, strict=True):
            self.told[sequence_id].token_ids += [next(token_ids) for _ in range(count)]
            self.num_again += count == 0
        for sequence_id, candidates in zip(answer.logprob_sequence_ids, candidates_of(answer.logprobs), strict=True):
            self.told[sequence_id].logprobs.append(candidates)
        for sequence_id, error in answer.failures:
            self.told[sequence_id].failure, self.told[sequence_id].has_ended = (error.reason, error.message), True
        for sequence_id in answer.skipped_sequence_ids:
            self.told[sequence_id].has_ended = True
        self.num_drafted += answer.num_draft_tokens
        self.num_accepted += answer.num_accepted_tokens


def texts_of(truth: dict[int, Told]) -> list[list[int]]:
    return [prompt_of(number) + told.token_ids for number, told in truth.items()]


def hostile(truth: dict[int, Told], seed: int = 0) -> HostileDrafts:
    drafts = HostileDrafts([STOP, 1, 0, SPOILED], seed)
    drafts.texts = texts_of(truth)
    return drafts


@cache
def truth_of(kernels: str, max_length: int = MAX_LENGTH) -> dict[int, Told]:
    """Runs every kind token by token."""
    return Run(make_executor(load(kernels), num_device_blocks=96), make_sequences(KINDS, max_length)).token_by_token()


def executor_with(kernels: str, drafting: DraftingOps, **sizes: int) -> StepExecutor:
    return make_executor(load(kernels), num_device_blocks=96, drafting=drafting, **sizes)


def test_the_sequences_are_worth_the_comparison() -> None:
    truth = truth_of(BEST).values()
    assert {told.token_ids[-1] == STOP for told in truth} == {True, False}
    assert any(len(told.token_ids) == MAX_LENGTH - PROMPT_LENGTH for told in truth)
    assert all(len(told.token_ids) > 3 and told.failure is None for told in truth)
    assert sum(bool(told.logprobs) for told in truth) == 2


@pytest.mark.parametrize(("kernels", "captured"), [(REFERENCE, 0), (BEST, 0), (BEST, 256)])
def test_hostile_drafts_change_nothing(kernels: str, captured: int) -> None:
    truth = truth_of(kernels)
    for seed in range(2):
        drafts = hostile(truth, seed)
        run = Run(executor_with(kernels, drafts, max_captured_tokens=captured), make_sequences(KINDS))
        assert run.with_drafts(seed) == truth
        # A grammar forces some, too.
        assert 0 < run.num_accepted < run.num_drafted
        assert 0 < drafts.num_written <= run.num_drafted


def test_plain_greedy_rows_take_the_best_of_a_replayed_step() -> None:
    sequences = make_sequences({key: {} for key in range(4)})
    truth = Run(executor_with(BEST, HostDrafting(), max_captured_tokens=256), sequences).token_by_token()
    run = Run(executor_with(BEST, hostile(truth), max_captured_tokens=256), sequences)
    assert run.with_drafts(1) == truth
    assert run.num_accepted > 0


@pytest.mark.parametrize("max_length", range(PROMPT_LENGTH + 5, PROMPT_LENGTH + 8))
def test_a_run_ends_at_the_length_of_its_sequence(max_length: int) -> None:
    truth = truth_of(BEST, max_length)
    assert any(PROMPT_LENGTH + len(told.token_ids) == max_length for told in truth.values())
    run = Run(executor_with(BEST, hostile(truth)), make_sequences(KINDS, max_length))
    assert run.with_drafts(max_length) == truth


def test_own_ids_and_predicted_ones_are_drafted_from() -> None:
    truth = truth_of(BEST)
    sequences = make_sequences(
        {name: {**asked, "predicted_token_ids": tuple(truth[number].token_ids)}
         for number, (name, asked) in enumerate(KINDS.items())}
    )  # fmt: skip
    run = Run(executor_with(BEST, HostDrafting()), sequences)
    assert run.with_drafts(1) == truth
    assert run.num_accepted > run.num_drafted // 2 > 20


def test_prices_decide_how_many_are_drafted_and_nothing_else() -> None:
    truth = {number: told for number, told in truth_of(BEST).items() if number < 4}
    drafted = []
    for prices in ((), (0,) * 24, (300,) * 24, (900,) * 24, (1001,) * 24):
        run = Run(executor_with(BEST, hostile(truth)), make_sequences(KINDS)[:4])
        assert run.with_drafts(1, prices) == truth
        drafted.append(run.num_drafted)
    assert drafted[0] == drafted[1] > drafted[2] > drafted[3] == drafted[4] == 0


def test_a_row_that_has_ended_computes_nothing_in_the_steps_behind() -> None:
    """As when the next step was sent before the answer came that ends the sequence."""
    [sequence] = make_sequences({"greedy": {}}, PROMPT_LENGTH + 3)
    drafts = HostileDrafts([], share_right=1.0)
    epoch = Epoch(executor_with(BEST, drafts), 1)
    truth = Run(executor_with(BEST, drafts), [sequence]).token_by_token()[0].token_ids
    drafts.texts = [prompt_of(0) + truth]
    [first] = epoch.execute(new_sequences=(sequence,), work=[(0, PROMPT_LENGTH)]).token_ids
    answers = []
    while sum(map(len, answers)) < 2:
        answers.append(epoch.execute(work=[(0, 1)], max_draft_tokens=np.array([5])).token_ids)
    assert [first, *(each for answer in answers for each in answer)] == truth
    late = epoch.execute(work=[(0, 1)], max_draft_tokens=np.array([5]))
    assert (late.token_ids, late.skipped_sequence_ids) == ((), (0,))


# Rows that are not finite


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the row of one token is not finite."""
    folder = tmp_path_factory.mktemp("spoiled") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][SPOILED] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kernels", "dtype"), [(REFERENCE, torch.float32), (BEST, torch.float32), (BEST, torch.bfloat16)]
)
def test_a_draft_that_is_not_finite_leaves_no_trace(kernels: str, dtype: torch.dtype, spoiled: Path) -> None:
    kinds = {name: asked for name, asked in KINDS.items() if "allowed_token_ids" not in asked}
    kinds = {name: {**asked, "logit_bias": {**asked.get("logit_bias", {}), SPOILED: -100.0}}
             for name, asked in kinds.items()}  # fmt: skip
    loaded = load(kernels, spoiled, dtype)
    truth = Run(make_executor(loaded, num_device_blocks=96), make_sequences(kinds)).token_by_token()
    assert not any(told.failure for told in truth.values())
    drafts = HostileDrafts([SPOILED])
    drafts.texts = texts_of(truth)
    run = Run(make_executor(loaded, num_device_blocks=96, drafting=drafts), make_sequences(kinds))
    assert run.with_drafts(1) == truth
    assert run.num_again > 10


def test_a_token_that_is_chosen_and_not_finite_fails_as_without_drafts(spoiled: Path) -> None:
    [sequence] = make_sequences({"chosen": {"allowed_token_ids": (SPOILED,)}})
    loaded = load(BEST, spoiled)
    truth = Run(make_executor(loaded), [sequence]).token_by_token()
    assert truth[0].failure is not None
    assert truth[0].failure[0] is Reason.NOT_FINITE
    run = Run(make_executor(loaded, drafting=HostileDrafts([SPOILED])), [sequence])
    assert run.with_drafts(1) == truth


def test_a_row_without_a_possible_token_fails_as_without_drafts() -> None:
    kinds = {"dead end": {"allowed_token_ids": (7, 8), "bad_token_sequences": ((8, 7), (8, 8)), "temperature": 1.0}}
    sequences = [make_sequences(kinds, stop_token_ids=())[0]]
    truth = Run(make_executor(load(BEST)), sequences).token_by_token()
    assert truth[0].failure is not None
    assert truth[0].failure[0] is Reason.NO_TOKEN_POSSIBLE
    drafts = HostileDrafts([7, 8])
    drafts.texts = [[*prompt_of(0), *truth[0].token_ids, 7, 7, 7, 7]]
    assert Run(make_executor(load(BEST), drafting=drafts), sequences).with_drafts(1) == truth


# Grammars


def test_what_a_grammar_forces_is_drafted() -> None:
    grammar = 'start: "It is a fact that this was forced: " /[0-9]/'
    [sequence] = make_sequences({"forced": {"grammar": grammar, "temperature": 1.0, "seed": 2}}, min_tokens=0)
    truth = Run(make_executor(load(BEST)), [sequence]).token_by_token()
    run = Run(make_executor(load(BEST), drafting=HostDrafting()), [sequence])
    assert run.with_drafts(3) == truth
    assert run.num_accepted > 5


# Ranks


class OtherIds(HostileDrafts):
    """Drafts as many as another source, and never the same ids."""

    def find_drafts(self, wanted: DraftRows) -> Drafts:
        found = super().find_drafts(wanted)
        for row, length, count in zip(wanted.rows, wanted.lengths, found.num_drafts, strict=True):
            ids = wanted.token_ids[row, length : length + count]
            ids[:] = (ids + 1) % wanted.vocab_size
        return found


def make_ranks(monkeypatch: pytest.MonkeyPatch, *drafting: DraftingOps) -> RanksExecutor:
    """Makes ranks, each with its own source of drafts."""
    # In one process ranks would share a backend.
    kernels = Kernels(REFERENCE, torch.float32)
    monkeypatch.setattr(loader, "get_backend", lambda *_, **__: new_backend(kernels, "none"))

    def make_rank(parallel: Parallel, ranks: RankSteps) -> StepExecutor:
        folder, device = tiny_model("llama"), torch.device("cpu")
        loaded = load_model(folder, torch.float32, device, lambda _, __: None, parallel=parallel)
        return make_executor(loaded, num_device_blocks=96, ranks=ranks, drafting=drafting[parallel.rank])

    return RanksExecutor(make_rank, len(drafting))


def test_ranks_draft_the_same_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = truth_of(REFERENCE)
    run = Run(make_ranks(monkeypatch, hostile(truth), hostile(truth)), make_sequences(KINDS))
    assert run.with_drafts(2) == truth
    assert run.num_accepted > 10


def test_a_rank_that_drafts_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    other = OtherIds([STOP])
    run = Run(make_ranks(monkeypatch, HostileDrafts([STOP]), other), make_sequences(KINDS))
    with pytest.raises(AssertionError, match="the ranks do not agree"):
        run.with_drafts(2)
    assert other.num_written > 0


# Refusals


def refusal_of(executor: StepExecutor, fields: dict[str, Any], **of_new: Any) -> str:
    epoch = Epoch(executor, 1)
    sequences = make_sequences({"greedy": {}, "sampled": {}}, **of_new)
    epoch.execute(new_sequences=tuple(sequences), work=[(0, PROMPT_LENGTH), (1, PROMPT_LENGTH)])
    refusal = epoch.answer(**{"work": [(0, 1), (1, 1)]} | fields).refusal
    assert refusal is not None
    assert refusal.reason is Reason.FIELD_INVALID
    return str(refusal.violations)


REFUSED = {
    "of each sequence": {"max_draft_tokens": np.array([1])},
    "too many for one": {"max_draft_tokens": np.array([MAX_DRAFT_TOKENS + 1, 0])},
    "too many prices": {"max_draft_tokens": np.array([1, 0]), "draft_prices": np.zeros(MAX_DRAFT_ROWS + 1, np.int64)},
    "prices alone": {"draft_prices": np.array([1])},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_allowance_is_refused(name: str) -> None:
    assert "draft" in refusal_of(executor_with(BEST, HostDrafting()), REFUSED[name])


def test_allowances_are_refused_where_nobody_drafts() -> None:
    allowed = {"max_draft_tokens": np.array([1, 0])}
    assert "at most 0" in refusal_of(make_executor(load(BEST)), allowed)
    executor = executor_with(BEST, HostDrafting())
    assert "max_length" in refusal_of(executor, allowed, max_length=0)
    # A pipeline stage sees no samples.
    assert "the scheduler brings the ids" in refusal_of(executor, {**allowed, "ids_from_scheduler": True})


def test_an_allowance_without_blocks_is_refused() -> None:
    executor = executor_with(BEST, HostDrafting())
    epoch = Epoch(executor, 1)
    new = new_sequence(1, prompt_of(1), [1, 2], SamplingParams(), max_length=40)
    epoch.execute(new_sequences=(new,), work=[(1, PROMPT_LENGTH)])
    refusal = epoch.answer(work=[(1, 1)], max_draft_tokens=np.array([5])).refusal
    assert refusal is not None
    assert "too short a block table" in str(refusal.violations)


def test_a_piece_of_a_prompt_may_not_draft() -> None:
    epoch = Epoch(executor_with(BEST, HostDrafting()), 1)
    refusal = epoch.answer(
        new_sequences=tuple(make_sequences({"greedy": {}})), work=[(0, PROMPT_LENGTH)], max_draft_tokens=np.array([1])
    ).refusal
    assert refusal is not None
    assert "only sequences that decode" in str(refusal.violations)
