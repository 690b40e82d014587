"""The steps decided beforehand, and the worker that runs them by itself."""

import numpy as np
import pytest

from benchmarks.kit import models
from benchmarks.kit.worker_alone import EPOCH, Planner, Settings, WorkerAlone
from benchmarks.kit.workload import FreshWorkloads, Workload
from blockyard_kernels.cpu.processors import available_instruction_sets

SETTINGS = Settings(
    model="", dtype="float32", num_device_blocks=40, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
)
SIZE = (4, 40, 9)
WORKLOAD = Workload(*SIZE, vocab_size=320)


@pytest.fixture
def planner():
    return Planner(SETTINGS)


def test_computes_every_token_but_the_last_of_each_request(planner):
    steps = planner.plan(WORKLOAD)
    assert sum(int(step.num_new_tokens.sum()) for step in steps) == 4 * (40 + 9 - 1)


def test_keeps_to_the_budgets(planner):
    steps = planner.plan(WORKLOAD)
    assert max(step.num_new_tokens.sum() for step in steps) == 64
    assert max(len(step.sequence_ids) for step in steps) == 4


def test_all_decode_together_once_all_are_prefilled(planner):
    steps = planner.plan(WORKLOAD)
    whole = [step for step in steps if len(step.sequence_ids) == 4 and (step.num_new_tokens == 1).all()]
    assert len(whole) >= 5


def test_carries_the_prompts_and_nothing_cached(planner):
    new = [sequence for step in planner.plan(WORKLOAD) for sequence in step.new_sequences]
    assert [sequence.token_ids.tolist() for sequence in new] == WORKLOAD.prompts()
    assert {sequence.num_computed_tokens for sequence in new} == {0}
    assert {sequence.sampling.temperature for sequence in new} == {0.0}


def test_batches_follow_one_another_in_one_epoch(planner):
    fresh = FreshWorkloads(320).of(*SIZE)
    steps = [step for _ in range(3) for step in planner.plan(next(fresh))]
    assert [step.step_id for step in steps] == list(range(1, len(steps) + 1))
    assert {step.epoch for step in steps} == {EPOCH}
    ended = np.concatenate([step.finished_sequence_ids for step in steps])
    assert len(set(ended.tolist())) == len(ended) == 12


def test_a_worker_runs_them_in_the_kernels_asked_for(tmp_path):
    cpu_kernels = available_instruction_sets()[-1]
    recipe = models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False)
    folder = models.write_model(recipe, tmp_path / "model")
    sizes = {"num_device_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    settings = Settings(str(folder), "float32", cpu_kernels=cpu_kernels, **sizes)
    fresh = FreshWorkloads(320).of(*SIZE)
    with WorkerAlone(settings) as worker:
        assert set(worker.facts) == {"device", "kernels"}
        assert worker.facts["kernels"] == f"cpu/{cpu_kernels}"
        assert worker.run(next(fresh)) > 0
        worker.pause()
        worker.resume()
        assert worker.run(next(fresh)) > 0


def test_a_worker_that_cannot_start_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="ended with code 1"):
        WorkerAlone(Settings(str(tmp_path)))
