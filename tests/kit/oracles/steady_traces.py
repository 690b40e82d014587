"""Random traces of steps through two executors: one in Python, one whose steady steps run without it.

    python -m tests.kit.oracles.steady_traces [--traces 2000] [--seed 0]

Arrays and answers must be the same to the last byte. Traces have new sequences between decodes, ends, rows that have
ended and are skipped, stop tokens, drafts, blocks that are appended, forks, copies, logits that are not finite, and
steps that are refused.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from blockyard.contract.sampling import SamplingParams
from blockyard_kernels.capture import CaptureSizes
from tests.kit.kernels.backends import BEST
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.codec import encode_result
from worker_service.drafting.drafter import Drafter
from worker_service.models.loader import load_model
from worker_service.runner.model_runner import ModelRunner
from worker_service.step import BlockPairs, ForkedRow, NewRow, Step, StepTimes
from worker_service.steps.steady import SteadySteps
from worker_service.steps.step_executor import StepExecutor

if TYPE_CHECKING:
    from worker_service.models.loader import RunnableModel
    from worker_service.step import StepOutput
    from worker_service.steps.steady import SteadyStep

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_TOKENS = 8, 160, 80, 8, 64
MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS = 6, 24
STOPS = (5, 9, 17)
NUM_PROMPTS = 24
# A token whose row of the embedding is not finite, in one of the models.
SPOILED = 77
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "cold": {"temperature": 0.05},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    # Not steady.
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3},
    "log probabilities": {"logprobs": 2},
}
WEIGHTS = (12, 4, 4, 6, 1, 1)


def make_executor(loaded: RunnableModel) -> StepExecutor:
    """Makes an executor that replays its steps and drafts, without a loop."""
    runner = ModelRunner(loaded)
    cache = CacheEngine(BlockFormat.of(loaded.model, BLOCK_SIZE), NUM_BLOCKS, 0, loaded.backend)
    cache.device_pool.fill_(float("nan"))
    loaded.model.reserve_positions(MAX_MODEL_LEN)
    sizes = CaptureSizes(MAX_NUM_TOKENS, MAX_NUM_SEQS, BLOCK_SIZE, loaded.config.sliding_window, MAX_MODEL_LEN)
    runner.capture(cache.device_pool, sizes)
    lengths = MAX_MODEL_LEN, MAX_NUM_SEQS, BLOCK_SIZE, MAX_NUM_TOKENS
    drafts = MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS
    limits = BatchLimits.of(loaded.config, loaded.model.kv_groups.windows, *lengths, drafts)
    return StepExecutor(InputBatch(limits, drafter=Drafter(loaded.backend.drafting)), cache, runner)


@dataclass(slots=True)
class _Sequence:
    """A sequence as the scheduler of a trace knows it."""

    prompt: tuple[int, ...]
    max_length: int
    block_ids: list[int] = field(default_factory=list)


def _prompt_of(number: int) -> list[int]:
    chooser = random.Random(number)
    return [chooser.randrange(SPOILED) for _ in range(1 + number % 12)]


class Trace:
    """Makes the steps of one epoch; `batch` says how far the sequences have come.

    `texts`: what followed a prompt in a trace before; sequences predict it, with lies among it.
    """

    def __init__(
        self, seed: int, epoch: int, batch: InputBatch, num_kv_groups: int, texts: dict[tuple[int, ...], list[int]]
    ) -> None:
        self._chooser = random.Random(seed)
        self._epoch = epoch
        self._batch = batch
        self._texts = texts
        self._num_kv_groups = num_kv_groups
        self._step_id = 0
        self._next_id = 1
        self._sequences: dict[int, _Sequence] = {}
        self._free = list(range(1, NUM_BLOCKS))
        self._chooser.shuffle(self._free)
        self._drafts = self._chooser.random() < 0.6
        self._calm = self._chooser.choice((0.02, 0.1, 0.3))

    def step(self) -> Step:
        """Makes the next step."""
        chance, self._step_id = self._chooser.random, self._step_id + 1
        fields: dict[str, Any] = {}
        gone = [each for each in self._sequences if self._batch.progress(each).ended and chance() < 0.4]
        gone += [each for each in self._sequences if each not in gone and chance() < self._calm / 4]
        for sequence_id in gone:
            text = tuple(self._batch.token_ids(sequence_id).tolist())
            self._texts[self._sequences[sequence_id].prompt] = list(text)
            self._free += self._sequences.pop(sequence_id).block_ids
        ids = list(self._sequences)
        if chance() < self._calm / 2:
            ids = [each for each in ids if chance() < 0.7]
        new = [self._begin() for _ in range(self._chooser.randint(1, 3)) if self._may_begin(chance())]
        forks = self._fork(ids) if len(ids) + len(new) < MAX_NUM_SEQS and chance() < self._calm / 4 else ()
        work = [(each, 1) for each in ids]
        work += [(each.sequence_id, len(each.token_ids)) for each in new]
        work += [(fork.child_id, 0) for fork in forks]
        if self._drafts and not new and not forks and ids and chance() < 0.8:
            fields |= self._allow(ids)
        allowed = fields.get("max_draft_tokens", [0] * len(ids))
        appended = self._append(ids, allowed, chance() < self._calm)
        if len(self._free) > 1 and chance() < self._calm / 4:
            fields["blocks_to_copy"] = BlockPairs(np.array(self._free[:1]), np.array(self._free[1:2]))
        if chance() < 0.002:
            appended, fields = self._spoil(ids, appended, fields)
        return Step(
            self._epoch,
            self._step_id,
            new_sequences=tuple(new),
            forks=forks,
            sequence_ids=tuple(each for each, _ in work),
            num_new_tokens=np.array([count for _, count in work], np.int64),
            finished_sequence_ids=tuple(gone),
            appended_sequence_ids=tuple(each for each, _ in appended),
            appended_block_ids=np.array([block for _, block in appended], np.int64),
            **fields,
        )

    def _may_begin(self, chance: float) -> bool:
        room = len(self._sequences) < MAX_NUM_SEQS - 2 and len(self._free) > 40
        return room and chance < (self._calm if self._sequences else 1.0)

    def _begin(self) -> NewRow:
        chooser = self._chooser
        sequence_id, self._next_id = self._next_id, self._next_id + 1
        [kind] = chooser.choices(list(KINDS), WEIGHTS)
        ids = _prompt_of(chooser.randrange(NUM_PROMPTS))
        max_length = chooser.choice((0, len(ids) + chooser.randint(1, 60), len(ids) + chooser.randint(20, 60)))
        sequence = self._sequences[sequence_id] = _Sequence(tuple(ids), max_length or MAX_MODEL_LEN)
        blocks = self._take_blocks(sequence, len(ids))
        text = self._texts.get(tuple(ids), []) if chooser.random() < 0.8 else []
        lies = (SPOILED, *STOPS, chooser.randrange(VOCAB_SIZE))
        predicted = tuple(chooser.choice(lies) if chooser.random() < 0.1 else each for each in text)
        asked = KINDS[kind] | {"seed": chooser.getrandbits(64), "predicted_token_ids": predicted}
        if chooser.random() < 0.1:
            asked["speculation"] = False
        return NewRow(
            sequence_id,
            chooser.randrange(3),
            np.array(ids, np.int64),
            prompt_length=len(ids),
            num_computed_tokens=0,
            block_ids=np.array(blocks, np.int64),
            sampling=SamplingParams(**({"temperature": 0.0} | asked)),
            min_tokens=chooser.choice((0, 0, 0, 4)),
            stop_token_ids=chooser.choice(((), STOPS[:1], STOPS)),
            max_length=max_length,
        )

    def _take_blocks(self, sequence: _Sequence, length: int) -> list[int]:
        missing = -(-length // BLOCK_SIZE) * self._num_kv_groups - len(sequence.block_ids)
        taken = [self._free.pop() for _ in range(missing)]
        sequence.block_ids += taken
        return taken

    def _fork(self, ids: list[int]) -> tuple[ForkedRow, ...]:
        parents = [each for each in ids if not self._batch.progress(each).ended]
        if not parents:
            return ()
        parent = self._chooser.choice(parents)
        child, self._next_id = self._next_id, self._next_id + 1
        mother = self._sequences[parent]
        twin = self._sequences[child] = _Sequence(mother.prompt, mother.max_length)
        blocks = self._take_blocks(twin, self._batch.progress(parent).num_tokens + 1)
        return (ForkedRow(parent, child, self._chooser.randrange(9), np.array(blocks, np.int64)),)

    def _allow(self, ids: list[int]) -> dict[str, Any]:
        """Lets some of the sequences draft."""
        allowed, left = [], MAX_DRAFT_ROWS
        for sequence_id in ids:
            sequence, progress = self._sequences[sequence_id], self._batch.progress(sequence_id)
            limit = 0 if sequence.max_length == MAX_MODEL_LEN else MAX_MODEL_LEN - progress.num_tokens
            most = max(0, min(MAX_DRAFT_TOKENS, left, limit))
            allowed.append(self._chooser.choice((0, most, most, self._chooser.randint(0, most))))
            left -= allowed[-1]
        prices = [self._chooser.randint(0, 900) for _ in range(self._chooser.choice((0, 0, 5, MAX_DRAFT_ROWS)))]
        return {"max_draft_tokens": np.array(allowed, np.int64), "draft_prices": np.array(prices, np.int64)}

    def _append(self, ids: list[int], allowed: Any, ahead: bool) -> list[tuple[int, int]]:
        appended = []
        for sequence_id, most in zip(ids, allowed, strict=True):
            length = min(self._batch.progress(sequence_id).num_tokens + int(most) + ahead, MAX_MODEL_LEN)
            appended += [(sequence_id, block) for block in self._take_blocks(self._sequences[sequence_id], length)]
        self._chooser.shuffle(appended)
        return appended

    def _spoil(self, ids: list[int], appended: list[tuple[int, int]], fields: dict[str, Any]) -> tuple[Any, Any]:
        """Makes a step that must be refused, unless the sequences that it concerns have ended."""
        kind = self._chooser.randrange(5)
        if kind == 0 and ids:
            return [*appended, (ids[0], self._chooser.choice((0, NUM_BLOCKS)))], fields
        if kind == 1:
            return appended[1:], fields
        if kind == 2:
            return appended, {**fields, "draft_prices": np.full(MAX_DRAFT_ROWS + 1, 5)}
        if kind == 3 and ids:
            return appended, {**fields, "max_draft_tokens": np.full(len(ids), MAX_DRAFT_TOKENS + 1)}
        self._step_id += 1
        return appended, fields


@dataclass
class Compared:
    """What the comparisons saw."""

    num_steps: int = 0
    num_in_loop: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_again: int = 0
    num_skipped: int = 0
    num_failures: int = 0
    num_refused: int = 0


class Twins:
    """Two executors of one model. They get the same steps."""

    def __init__(self, loaded: RunnableModel, seen: Compared) -> None:
        self._plain, self._looping = make_executor(loaded), make_executor(loaded)
        captured = self._looping.runner.captured
        assert captured is not None
        loop = captured.decode_loop()
        assert loop is not None
        self._steady = SteadySteps(loop)
        self._num_kv_groups = loaded.model.kv_groups.num_groups
        self._epoch = 0
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._seen = seen
        self._answers: list[StepOutput] = []

    def run(self, seed: int, num_steps: int) -> None:
        """Runs a trace, and compares after each flight of steps."""
        self._epoch += 1
        for executor in (self._plain, self._looping):
            executor.begin_epoch(self._epoch)
        chooser = random.Random(seed)
        trace = Trace(seed, self._epoch, self._plain.batch, self._num_kv_groups, self._texts)
        answers: list[StepOutput] = []
        flight: list[SteadyStep] = []
        for number in range(num_steps):
            step = trace.step()
            answers.append(self._plain.execute(step, 0.0))
            steady = self._steady.read(step, 0.0, lambda _, answer: self._answers.append(answer))
            if steady is not None:
                flight.append(steady)
            if flight and (steady is None or chooser.random() < 0.1 or number == num_steps - 1):
                self._run_flight(flight)
                flight = []
            if steady is None:
                self._answers.append(self._looping.execute(step, 0.0))
            if not flight:
                self._compare(answers, seed)
                if answers[-1].refusal is not None:
                    return
                answers = []

    def _run_flight(self, flight: list[SteadyStep]) -> None:
        """Runs steps that are like one another, in the loop as far as that goes."""
        while flight:
            first, *others = flight
            rows = self._looping.steady_rows(first.step)
            if rows is None:
                self._answers.append(self._looping.execute(first.step, 0.0))
                flight = others
                continue

            def push_all(others: list[SteadyStep] = others) -> bool:
                assert all(map(self._steady.push, others))
                return False

            last_step_id, flight = self._steady.run(first, rows, push_all)
            self._looping.go_on_behind(last_step_id)
            self._steady.send()
            if flight:
                self._answers.append(self._looping.execute(flight[0].step, 0.0))
                flight = flight[1:]

    def _compare(self, answers: list[StepOutput], seed: int) -> None:
        found, self._answers = self._answers, []
        assert len(found) == len(answers), seed
        for mine, truth in zip(found, answers, strict=True):
            assert _encoded(mine) == _encoded(truth), (seed, mine, truth)
            self._note(truth)
        for name, mine in arrays_of(self._looping).items():
            assert mine.tobytes() == arrays_of(self._plain)[name].tobytes(), (seed, name)

    def _note(self, answer: StepOutput) -> None:
        seen = self._seen
        seen.num_steps += 1
        seen.num_drafts += answer.num_draft_tokens
        seen.num_accepted += answer.num_accepted_tokens
        seen.num_again += answer.num_tokens.count(0)
        seen.num_skipped += len(answer.skipped_sequence_ids)
        seen.num_failures += len(answer.failures)
        seen.num_refused += answer.refusal is not None

    @property
    def num_in_loop(self) -> int:
        return self._steady.num_steps


def _encoded(answer: StepOutput) -> bytes:
    return encode_result(replace(answer, times=StepTimes())).SerializeToString(deterministic=True)


def arrays_of(executor: StepExecutor) -> dict[str, Any]:
    """Returns the arrays that steps write: of rows, of drafts, and the keys and values."""
    batch: Any = executor.batch
    drafts = batch._drafts
    return {
        "progress": batch._progress,
        "token_ids": batch._token_ids,
        "block_tables": batch._block_tables,
        "starts_over": drafts.starts_over,
        "tried": drafts.drafter.tried,
        "right": drafts.drafter.right,
        "pool": executor.cache.device_pool.view(torch.uint8).numpy(),
    }


def spoil(folder: Path) -> Path:
    """Copies a model, and makes the row of one token not finite."""
    shutil.copytree(tiny_model("llama"), folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][SPOILED] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    return folder


def compare(num_traces: int, first_seed: int = 0, num_steps: int = 40, kernels: str = BEST) -> Compared:
    """Runs traces over several models, and returns what they saw."""
    seen = Compared()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        models = [(tiny_model("llama"), torch.float32), (tiny_model("qwen3"), torch.bfloat16)]
        models.append((spoil(Path(folder) / "model"), torch.float32))
        for place, (model, dtype) in enumerate(models):
            loaded = load_model(model, dtype, torch.device("cpu"), lambda _, __: None, kernels)
            twins = Twins(loaded, seen)
            for seed in range(first_seed + place, first_seed + num_traces, len(models)):
                twins.run(seed, num_steps)
            seen.num_in_loop += twins.num_in_loop
    return seen


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", default=BEST)
    options = parser.parse_args()
    sys.stdout.write(f"{compare(options.traces, options.seed, kernels=options.kernels)}\n")


if __name__ == "__main__":
    main()
