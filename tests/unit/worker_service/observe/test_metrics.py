"""What a worker tells Prometheus of its steps and its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from blockyard.contract.workers import SaveRequest, StateFormat
from blockyard.errors import BlockyardError, Reason
from tests.kit.processes.scrape import Scrape
from tests.unit.worker_service.driver import WorkerDriver, new_sequence
from worker_service.observe.metrics import CATALOGUE, PHASES, WorkerMetrics
from worker_service.step import Step, StepOutput, StepTimes
from worker_service.weights.saving import Saving

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(range(5, 25))


def scrape(worker: WorkerDriver) -> Scrape:
    return Scrape.of(worker.server.worker.metrics.registry)


async def test_a_fresh_worker_tells_all_it_has(fresh_worker: WorkerDriver) -> None:
    seen = scrape(fresh_worker)
    assert fresh_worker.server.worker.metrics.registry.find_missing == []
    assert [metric.name for metric in CATALOGUE if not seen.has(metric)] == []
    assert seen.sum("blockyard_worker_state", state="CREATED") == seen.sum("blockyard_worker_state") == 1
    for name in ("weights_bytes", "pool_bytes", "model_loads_total", "lora_adapters", "lora_bytes"):
        assert seen.sum(f"blockyard_worker_{name}") == 0
    assert seen.sum("blockyard_ready") == 1


async def test_weights_and_pools_are_told_in_bytes(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.prepare(model)
    inside, seen = fresh_worker.server.worker, scrape(fresh_worker)
    assert inside.set_up.loaded is not None
    assert inside.set_up.cache is not None
    assert seen.sum("blockyard_worker_weights_bytes") == inside.set_up.loaded.parameter_bytes > 0
    block_bytes = inside.set_up.cache.cache_block_bytes
    assert seen.sum("blockyard_worker_pool_bytes", pool="device") == 65 * block_bytes
    assert seen.sum("blockyard_worker_pool_bytes", pool="host") == 16 * block_bytes
    assert seen.sum("blockyard_worker_state", state="CACHE_READY") == 1
    assert seen.sum("blockyard_worker_model_loads_total") == 1
    assert seen.sum("blockyard_worker_load_seconds", source="files") == inside.set_up.loaded.origin.seconds > 0


async def test_saves_are_counted_where_they_fail_too(fresh_worker: WorkerDriver, model: Path, tmp_path: Path) -> None:
    inside = fresh_worker.server.worker
    assert scrape(fresh_worker).sum("blockyard_worker_load_seconds") == 0
    await fresh_worker.prepare(model)
    saving = Saving(inside, tmp_path, inside.metrics.on_save)
    await saving.save(SaveRequest(StateFormat.SHARDED, "it"), lambda done, total: None)
    for save_format in StateFormat:
        with pytest.raises(BlockyardError):
            await saving.save(SaveRequest(save_format, ".."), lambda done, total: None)
    seen = scrape(fresh_worker)
    assert seen.sum("blockyard_worker_saves_total", format="sharded", result="saved") == 1
    assert seen.sum("blockyard_worker_saves_total", result="failed") == 2
    assert seen.sum("blockyard_worker_save_seconds", format="sharded") > 0
    assert seen.sum("blockyard_worker_save_seconds", format="packed") == 0


async def test_steps_and_tokens_are_counted(worker: WorkerDriver) -> None:
    stream = worker.open(epoch=3)
    new = new_sequence(1, PROMPT, [1, 2, 3, 4])
    await stream.step(new_sequences=[new], sequence_ids=[1], num_new_tokens=[12])
    await stream.step(sequence_ids=[1], num_new_tokens=[8])
    await stream.decode(1, 5)
    await stream.refused(sequence_ids=[9], num_new_tokens=[1])
    # A step is counted when its answer is on its way.
    await worker.server.worker._thread.run(lambda: None)
    seen = scrape(worker)
    assert seen.sum("blockyard_worker_steps_total") == 7
    assert seen.sum("blockyard_worker_refused_steps_total") == 1
    assert seen.sum("blockyard_worker_computed_tokens_total") == 20 + 5
    assert seen.sum("blockyard_worker_sampled_tokens_total") == 6
    assert seen.sum("blockyard_worker_epoch") == 3
    for phase in PHASES:
        assert seen.sum("blockyard_worker_step_seconds_count", phase=phase) == 7
    assert seen.sum("blockyard_worker_step_seconds_sum", phase="forward") > 0


async def test_calls_are_counted(worker: WorkerDriver) -> None:
    method = "blockyard.worker.v1.WorkerService/GetWorkerInfo"
    before = scrape(worker).sum("blockyard_grpc_calls_total", method=method, code="OK")
    await worker.info()
    assert scrape(worker).sum("blockyard_grpc_calls_total", method=method, code="OK") == before + 1


def test_the_phases_are_those_of_the_answer() -> None:
    metrics = WorkerMetrics()
    step = Step(1, 1, num_new_tokens=np.array([1, 7, 0], np.int64))
    metrics.on_step(step, StepOutput(1, 1, token_ids=(5, 6), times=StepTimes(0.1, 0.02, 0.003, 0.0004, 0.0, 5e-5)))
    metrics.on_step(step, StepOutput(1, 2, refusal=BlockyardError(Reason.WRONG_STATE, "no"), times=StepTimes(9.0)))
    seen = Scrape.of(metrics.registry)
    told = {phase: seen.sum("blockyard_worker_step_seconds_sum", phase=phase) for phase in PHASES}
    assert told == {"queue": 0.1, "cache_operations": 0.02, "forward": 0.003, "sample": 0.0004, "stage_wait": 5e-5}
    assert seen.sum("blockyard_worker_computed_tokens_total") == 8
    assert seen.sum("blockyard_worker_sampled_tokens_total") == 2
    assert seen.sum("blockyard_worker_refused_steps_total") == seen.sum("blockyard_worker_steps_total") == 1
