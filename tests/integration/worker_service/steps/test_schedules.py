"""The worker's own master oracle: any schedule of a set of sequences gives each what running alone gives it.

Random pieces, random company, restarts, swaps to and from the host, blocks that change hands at once, forks: driven on
the step executor itself, with a model, without a socket.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.contract.sampling import SamplingParams, ThinkingTokens
from tests.kit.kernels.late_streams import lazy_swaps
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service.executor import BLOCK_SIZE, candidates_of, make_executor
from worker_service.models.loader import load_model
from worker_service.step import BlockPairs, ForkedRow, NewRow, Step

if TYPE_CHECKING:
    from worker_service.models.loader import RunnableModel
    from worker_service.step import PromptPieceLogprobs, StepOutput
    from worker_service.steps.step_executor import StepExecutor

NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 20, 12
NUM_OUTPUT = 8
BAD_WORDS = tuple((token_id, token_id % 7) for token_id in range(200))
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1, logprobs=0, prompt_logprobs=4),
    SamplingParams(seed=2, top_k=12, temperature=0.7),
    SamplingParams(seed=3, top_p=0.85, repetition_penalty=1.2, frequency_penalty=0.4),
    SamplingParams(seed=4, min_p=0.02, logit_bias={5: 2.0}, allowed_token_ids=tuple(range(0, 120, 3)), logprobs=3),
    SamplingParams(
        temperature=0.0,
        logprobs=2,
        prompt_logprobs=0,
        presence_penalty=1.5,
        bad_token_sequences=tuple((i, i % 7) for i in range(200)),
    ),
    SamplingParams(seed=6, thinking_token_budget=3, thinking_tokens=ThinkingTokens(9, is_open=True), logprobs=1),
    SamplingParams(seed=5, temperature=1.5, grammar="start: /([a-z]{1,3}[ ,]){99}/", logprobs=1),
)


@dataclass
class Live:
    """A sequence as its scheduler would know it."""

    sequence_id: int
    prompt: list[int]
    sampling: SamplingParams
    index: int = 0
    known: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    told: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Log probabilities, by what they are of and the token's position. What is told again must be the same."""

    @property
    def output(self) -> list[int]:
        return self.known[len(self.prompt) :]

    def asked(self) -> list[tuple[str, int]]:
        """What must be told of it in the end."""
        length = len(self.prompt)
        prompt = [] if self.sampling.prompt_logprobs is None else [("prompt", place) for place in range(1, length)]
        output = [] if self.sampling.logprobs is None else [("output", length + place) for place in range(NUM_OUTPUT)]
        return prompt + output

    def tell(self, what: str, position: int, candidates: Any) -> None:
        assert self.told.setdefault((what, position), candidates) == candidates

    def tell_prompt(self, piece: PromptPieceLogprobs) -> None:
        for offset, candidates in enumerate(candidates_of(piece.logprobs)):
            self.tell("prompt", piece.first_position + offset, candidates)


def small_executor(loaded: RunnableModel, max_captured_tokens: int = 0) -> StepExecutor:
    return make_executor(
        loaded,
        num_device_blocks=NUM_DEVICE_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        max_captured_tokens=max_captured_tokens,
    )


@pytest.fixture(
    scope="module",
    params=[
        ("llama", torch.float32, "reference"),
        ("qwen3", torch.bfloat16, "auto"),
        ("mistral", torch.float32, "auto"),
        ("llama", torch.bfloat16, "auto"),
    ],
)
def loaded(request: pytest.FixtureRequest) -> RunnableModel:
    name, dtype, cpu_kernels = request.param
    return load_model(tiny_model(name), dtype, torch.device("cpu"), lambda done, total: None, cpu_kernels)


class Chaos:
    """Schedules at random, but never against the rules."""

    def __init__(self, executor: StepExecutor, seed: int) -> None:
        self.random = random.Random(seed)
        self.executor = executor
        self.device = list(range(1, NUM_DEVICE_BLOCKS))
        self.host = list(range(NUM_HOST_BLOCKS))
        self.step_id = 0
        executor.begin_epoch(seed + 1)
        self.epoch = seed + 1

    def execute(self, **fields: Any) -> StepOutput:
        self.step_id += 1
        result = self.executor.execute(Step(self.epoch, self.step_id, **fields), 0.0)
        assert result.refusal is None, result.refusal
        assert not result.failures
        return result

    def blocks(self, pool: list[int], count: int) -> list[int]:
        self.random.shuffle(pool)
        return [pool.pop() for _ in range(count)]

    def run(self, sequences: list[Live]) -> None:
        waiting, live = list(sequences), list[Live]()
        while waiting or live:
            if waiting and (not live or self.random.random() < 0.4):
                live.append(waiting.pop(0))
            self.step(live)
            for one in [one for one in live if len(one.output) >= NUM_OUTPUT]:
                live.remove(one)
                self.execute(finished_sequence_ids=(one.sequence_id,))
                self.device += one.table
                self.host += one.host

    def step(self, live: list[Live]) -> None:
        fields: dict[str, Any] = {name: [] for name in ("new", "finished", "appended", "replaced", "out", "into")}
        taken: list[int] = []
        scheduled: list[tuple[Live, int]] = []
        for one in self.random.sample(live, len(live)):
            action = self.random.random()
            if one.host:
                if action < 0.5 and len(self.device) >= len(one.host):
                    self.swap_in(one, fields, taken)
                else:
                    continue
            elif one.table and action < 0.1 and len(self.host) >= len(one.table):
                self.swap_out(one, fields)
                continue
            elif one.table and action < 0.2:
                self.forget(one, fields)
            elif action < 0.35:
                continue
            piece = self.piece(one, fields)
            if piece:
                scheduled.append((one, piece))
        result = self.execute(
            new_sequences=tuple(fields["new"]),
            finished_sequence_ids=tuple(fields["finished"]),
            sequence_ids=tuple(one.sequence_id for one, _ in scheduled),
            num_new_tokens=np.array([piece for _, piece in scheduled], np.int64),
            appended_sequence_ids=tuple(i for i, _ in fields["appended"]),
            appended_block_ids=np.array([block for _, block in fields["appended"]], np.int64),
            replaced_tables=tuple(fields["replaced"]),
            blocks_to_swap_out=columns(fields["out"]),
            blocks_to_swap_in=columns(fields["into"]),
        )
        # A host block that was read may be written from the next step on.
        self.host += taken
        for one, piece in scheduled:
            one.computed += piece
        take(result, [one for one, _ in scheduled])

    def swap_out(self, one: Live, fields: dict[str, Any]) -> None:
        one.host = self.blocks(self.host, len(one.table))
        fields["out"] += zip(one.table, one.host, strict=True)
        self.device += one.table
        one.table = []

    def swap_in(self, one: Live, fields: dict[str, Any], taken: list[int]) -> None:
        one.table = self.blocks(self.device, len(one.host))
        fields["into"] += zip(one.host, one.table, strict=True)
        fields["replaced"].append((one.sequence_id, np.array(one.table, np.int64)))
        taken += one.host
        one.host = []

    def forget(self, one: Live, fields: dict[str, Any]) -> None:
        fields["finished"].append(one.sequence_id)
        self.device += one.table
        one.table, one.computed = [], 0

    def piece(self, one: Live, fields: dict[str, Any]) -> int:
        if not one.known:
            one.known = list(one.prompt)
        piece = self.random.randint(1, len(one.known) - one.computed)
        missing = -(-(one.computed + piece) // BLOCK_SIZE) - len(one.table)
        if missing > len(self.device):
            return 0
        grown = self.blocks(self.device, max(0, missing))
        starts = not one.table
        one.table += grown
        if starts:
            fields["new"].append(new_of(one))
        elif not any(i == one.sequence_id for i, _ in fields["replaced"]):
            fields["appended"] += [(one.sequence_id, block) for block in grown]
        else:
            fields["replaced"] = [
                (i, np.array(one.table, np.int64) if i == one.sequence_id else table) for i, table in fields["replaced"]
            ]
        return piece


def take(result: StepOutput, scheduled: list[Live]) -> None:
    """Gives what a step told and sampled to its sequences."""
    by_id = {one.sequence_id: one for one in scheduled}
    for piece in result.prompt_logprobs:
        by_id[piece.sequence_id].tell_prompt(piece)
    for sequence_id, candidates in zip(result.logprob_sequence_ids, candidates_of(result.logprobs), strict=True):
        by_id[sequence_id].tell("output", len(by_id[sequence_id].known), candidates)
    tokens = dict(zip(result.sequence_ids, result.token_ids, strict=True))
    assert tokens.keys() == {one.sequence_id for one in scheduled if one.computed == len(one.known)}
    for sequence_id, token_id in tokens.items():
        by_id[sequence_id].known.append(token_id)


def columns(pairs: list[tuple[int, int]]) -> BlockPairs:
    return BlockPairs(np.array([s for s, _ in pairs], np.int64), np.array([d for _, d in pairs], np.int64))


def new_of(one: Live) -> NewRow:
    return NewRow(
        one.sequence_id, one.index, np.array(one.known, np.int64), len(one.prompt), 0, np.array(one.table, np.int64),
        one.sampling,
    )  # fmt: skip


def alone(executor: StepExecutor, one: Live) -> list[int]:
    """Runs a sequence by itself: its prompt at once, then token by token."""
    executor.begin_epoch(10**6 + one.sequence_id)
    table = np.arange(1, 12)
    new = NewRow(7, one.index, np.array(one.prompt, np.int64), len(one.prompt), 0, table, one.sampling)
    output: list[int] = []
    fields: dict[str, Any] = {"new_sequences": (new,), "num_new_tokens": np.array([len(one.prompt)])}
    for step_id in range(1, NUM_OUTPUT + 1):
        result = executor.execute(Step(10**6 + one.sequence_id, step_id, sequence_ids=(7,), **fields), 0.0)
        assert result.refusal is None, result.refusal
        for candidates in candidates_of(result.logprobs):
            one.tell("output", len(one.prompt) + len(output), candidates)
        for piece in result.prompt_logprobs:
            one.tell_prompt(piece)
        output += result.token_ids
        fields = {"num_new_tokens": np.array([1])}
    return output


def sequences(seed: int, vocab_size: int) -> list[Live]:
    generator = random.Random(seed)
    return [
        Live(
            i,
            [generator.randrange(vocab_size) for _ in range(generator.randint(1, 30))],
            SAMPLINGS[i % len(SAMPLINGS)],
            i % 3,
        )
        for i in range(6)
    ]


@pytest.mark.parametrize(("seed", "has_streams"), [(0, True), (1, False)], ids=["streams", ""])
def test_any_schedule_gives_the_tokens_of_running_alone(loaded: RunnableModel, seed: int, has_streams: bool) -> None:
    """Alone its ops run one by one; then steps are replayed where they are small enough and tell nothing of prompts.

    Swaps go at once, or as late as their streams allow.
    """
    lonely = small_executor(loaded)
    chosen = sequences(seed, loaded.config.vocab_size)
    expected = [alone(lonely, one) for one in chosen]
    told = [one.told for one in chosen]
    for one in chosen:
        one.told = {}
    executor = small_executor(loaded, max_captured_tokens=20)
    if has_streams:
        executor.cache.swap_on(lazy_swaps())
    chaos = Chaos(executor, seed)
    chaos.run(chosen)
    assert [one.output for one in chosen] == expected
    assert [one.told for one in chosen] == told
    assert [sorted(one.told) for one in chosen] == [sorted(one.asked()) for one in chosen]
    assert sorted(chaos.device) == list(range(1, NUM_DEVICE_BLOCKS))
    assert sorted(chaos.host) == list(range(NUM_HOST_BLOCKS))
    assert len(executor.batch) == 0


def test_a_child_is_what_it_would_be_alone(loaded: RunnableModel) -> None:
    executor = small_executor(loaded)
    prompt, params = list(range(3, 27)), SamplingParams(seed=9, temperature=0.9, presence_penalty=0.3)
    expected = [alone(executor, Live(i, prompt, params, i)) for i in range(3)]
    executor.begin_epoch(10**7)
    table = np.array([1, 2, 3])
    new = NewRow(0, 0, np.array(prompt), len(prompt), 0, table, params)
    executor.execute(Step(10**7, 1, new_sequences=(new,), sequence_ids=(0,), num_new_tokens=np.array([23])), 0.0)
    forks = tuple(ForkedRow(0, i, i, table) for i in (1, 2))
    fields: dict[str, Any] = {"forks": forks, "num_new_tokens": np.array([1, 0, 0])}
    found: list[list[int]] = [[], [], []]
    for step_id in range(2, NUM_OUTPUT + 2):
        result = executor.execute(Step(10**7, step_id, sequence_ids=(0, 1, 2), **fields), 0.0)
        assert result.refusal is None, result.refusal
        for i, token_id in enumerate(result.token_ids):
            found[i].append(token_id)
        fields = {"num_new_tokens": np.array([1, 1, 1])}
        if step_id == 2:
            fields |= {"appended_sequence_ids": (0, 1, 2), "appended_block_ids": np.array([10, 11, 12])}
    assert found == expected
