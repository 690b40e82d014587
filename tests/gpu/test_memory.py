"""Blocks that are counted to fit do: with all of them in place, and graphs, the largest step has room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from blockyard.contract.workers import CachePlan, ProfileRequest
from worker_service.device import memory
from worker_service.runner.dry_runs import dry_step
from worker_service.worker import Worker

if TYPE_CHECKING:
    from worker_service.steps.step_executor import StepExecutor

pytestmark = pytest.mark.gpu

MAX_TOKENS, MAX_SEQS, MAX_LEN = 512, 16, 256
# So much that a pool fills its share of the memory.
USED = 0.5


async def test_the_largest_step_fits_beside_the_blocks_that_were_counted(device: torch.device) -> None:
    worker = Worker(num_threads=1)
    worker.start()
    await worker.init_device(device.type, torch.float32, "")
    await worker.load_model("", "main", lambda done, total: None)
    plan = await worker.determine_num_available_blocks(ProfileRequest(0, USED, 1 << 20, MAX_TOKENS, MAX_SEQS))
    sizes = (plan.block_size, plan.num_device_blocks, plan.num_host_blocks, MAX_LEN, MAX_TOKENS, MAX_SEQS)
    await worker.initialize_cache(CachePlan(*sizes))
    executor = worker.set_up.executor
    assert executor is not None

    def check(executor: StepExecutor = executor) -> None:
        pool = executor.cache.device_pool
        if device.type == "cuda":
            free_bytes = memory.gpu_free_bytes(device)
            assert memory.fitting_utilization(plan, free_bytes, executor.num_captured_bytes) is None
        dry_step(executor.runner, pool, plan.block_size, num_sequences=MAX_SEQS, num_tokens=MAX_TOKENS)

    await worker._thread.run(check)
    assert await worker.stop(30)
