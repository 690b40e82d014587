"""Steps without Python: the same to the last byte, and whatever else a worker does while it waits for the next one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.common.v1 import status_pb2
from blockyard.errors import Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.backends import build_kernels
from tests.kit.oracles.steady_traces import compare
from tests.unit.worker_service.driver import new_sequence, running_worker, sampling
from worker_service.batch.rows import PROGRESS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.unit.worker_service.driver import StepDriver, WorkerDriver

PROMPT = list(range(5, 25))
NUM_STEPS = 24


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    build_kernels()


@pytest.fixture
async def worker(socket_folder: Path, model: Path) -> AsyncIterator[WorkerDriver]:
    """A worker with a loop, and one without beside it."""
    async with running_worker(socket_folder) as driver:
        await driver.prepare(model)
        yield driver


def num_in_loop(worker: WorkerDriver) -> int:
    executor = worker.server.worker.set_up.executor
    assert executor is not None
    assert executor.steady is not None
    return executor.steady.num_steps


def start(sequence_id: int = 1, **asked: Any) -> dict[str, Any]:
    blocks = range(8 * sequence_id, 8 * sequence_id + 8)
    new = new_sequence(sequence_id, PROMPT, blocks, sampling=sampling(**asked))
    return {"new_sequences": [new], "sequence_ids": [sequence_id], "num_new_tokens": [20]}


async def tokens_of(steps: StepDriver, num_tokens: int = NUM_STEPS) -> list[int]:
    return [(await steps.sampled(**start()))[1], *await steps.decode(1, num_tokens)]


@pytest.fixture
async def truth(socket_folder: Path, model: Path) -> list[int]:
    """The tokens of a worker without a loop."""
    folder = socket_folder / "plain"
    folder.mkdir()
    async with running_worker(folder, steady_loop=False) as driver:
        await driver.prepare(model)
        executor = driver.server.worker.set_up.executor
        assert executor is not None
        assert executor.steady is None
        return await tokens_of(driver.open(1))


def test_traces_are_the_same_in_python_and_without() -> None:
    seen = compare(30)
    for name in seen.__dataclass_fields__:
        assert getattr(seen, name) > 0, name
    assert seen.num_in_loop > seen.num_steps / 4


def test_the_record_of_progress_is_that_of_the_kernels() -> None:
    assert PROGRESS.fields is not None
    offsets = {name: offset for name, (_, offset) in PROGRESS.fields.items()}
    assert offsets == {"num_tokens": 0, "num_computed_tokens": 8, "num_blocks": 16, "ended": 24}
    assert PROGRESS.itemsize == 32


async def test_decodes_of_the_same_sequences_run_in_the_loop(worker: WorkerDriver, truth: list[int]) -> None:
    assert await tokens_of(worker.open(1)) == truth
    assert num_in_loop(worker) == NUM_STEPS


async def test_steps_in_flight_are_answered_in_order(worker: WorkerDriver, truth: list[int]) -> None:
    steps, tokens = worker.open(1), []
    await steps.send(**start())
    for _ in range(NUM_STEPS):
        await steps.send(sequence_ids=[1], num_new_tokens=[1])
    for step_id in range(1, NUM_STEPS + 2):
        answer = await steps.answer()
        assert answer.step_id == step_id
        tokens += answer.token_ids
    assert tokens == truth


async def test_another_sequence_ends_the_loop_and_the_next_begins_one(worker: WorkerDriver, truth: list[int]) -> None:
    steps = worker.open(1)
    tokens = await tokens_of(steps, 8)
    joining = start(2)
    answer = await steps.step(**{**joining, "sequence_ids": [1, 2], "num_new_tokens": [1, 20]})
    tokens.append(answer.token_ids[0])
    others = [answer.token_ids[1]]
    for _ in range(NUM_STEPS - 9):
        one, two = (await steps.step(sequence_ids=[1, 2], num_new_tokens=[1, 1])).token_ids
        tokens.append(one)
        others.append(two)
    assert tokens == truth
    assert others == truth[: len(others)]
    assert num_in_loop(worker) == NUM_STEPS - 1


async def test_other_work_has_its_turn_while_the_loop_waits(worker: WorkerDriver, truth: list[int]) -> None:
    steps = worker.open(1)
    tokens = await tokens_of(steps, 4)
    before = num_in_loop(worker)
    async with asyncio.timeout(20):
        first_block = await worker.checksums([8])
        assert (await worker.info()).state == status_pb2.WORKER_STATE_RUNNING
        tokens += await steps.decode(1, 2)
        assert await worker.checksums([8]) == first_block
    assert num_in_loop(worker) == before + 2
    assert tokens == truth[:7]


async def test_a_profile_has_every_step(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await tokens_of(steps, 4)
    await worker.stub.StartProfile(pb.StartProfileRequest())
    before = num_in_loop(worker)
    await steps.decode(1, 3)
    pieces = [piece async for piece in worker.stub.StopProfile(pb.StopProfileRequest())]
    assert (pieces[0].summary.num_steps, num_in_loop(worker)) == (3, before)


@pytest.mark.parametrize("how", ["break", "take over", "drain"])
async def test_an_end_reaches_a_loop_that_waits(how: str, worker: WorkerDriver, truth: list[int]) -> None:
    steps = worker.open(1)
    await tokens_of(steps, 4)
    if how == "drain":
        async with asyncio.timeout(20):
            await worker.server.stop()
        assert (await steps.answer()).draining
        return
    if how == "break":
        steps.call.cancel()
        await worker.wait_for(lambda info: info.state == status_pb2.WORKER_STATE_CACHE_READY)
    assert await tokens_of(worker.open(2)) == truth
    if how == "take over":
        assert (await steps.end_error()).reason is Reason.WRONG_STATE


async def test_a_step_is_refused_as_without_a_loop(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await tokens_of(steps, 4)
    appended = {"appended_sequence_ids": [1], "appended_block_ids": [65]}
    error = await steps.refused(sequence_ids=[1], num_new_tokens=[1], **appended)
    assert "device blocks must be from 1 to 64" in str(error)
    assert (await steps.refused(sequence_ids=[1], num_new_tokens=[1])).reason is Reason.WRONG_STATE


async def test_a_sequence_that_needs_python_gets_it(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await steps.step(**start(1, repetition_penalty=1.3))
    await steps.decode(1, 4)
    assert num_in_loop(worker) == 0


async def test_the_metrics_count_every_step_once(worker: WorkerDriver) -> None:
    await tokens_of(worker.open(1))
    counts = dict(worker.server.worker.metrics._steps.samples())
    assert counts == {(): NUM_STEPS + 1}


async def test_times_are_those_of_the_clock(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    await tokens_of(steps, 4)
    times = (await steps.step(sequence_ids=[1], num_new_tokens=[1])).times
    seconds = [part.ToNanoseconds() / 1e9 for part in (times.queue, times.forward, times.sample)]
    assert all(0 <= each < 20 for each in seconds)
    assert np.sum(seconds) > 0
