"""Replicas that save their weights: what is told, and what becomes of their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2
from blockyard.errors import BlockyardError, Reason
from tests.kit.oracles.token_oracle import oracle
from tests.kit.refusals import refused

if TYPE_CHECKING:
    from tests.unit.scheduler_service.conftest import Harness, Operator

PROMPT = [1] * 20


async def save(operator: Operator, folder: str = "it", save_format: int = administration_pb2.STATE_FORMAT_PACKED):
    request = admin_pb2.SaveStateRequest(folder=folder, format=save_format)  # type: ignore[arg-type]
    return [event async for event in operator.stub.SaveState(request)]


async def test_requests_go_on_once_a_replica_is_saved(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", PROMPT, max_tokens=60)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 5)
    progress, saved = await save(operator)
    assert progress.progress == admin_pb2.SaveProgress(rank=0, done_bytes=1, total_bytes=2)
    assert saved.workers == [administration_pb2.SavedState(folder="/root/it", files=["a"], num_bytes=2)]
    assert await client.result(stream) == oracle(PROMPT, 60)


async def test_a_worker_that_cannot_save_says_why_and_goes_on(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    assert await client.result(await client.add("first", PROMPT, max_tokens=3)) == oracle(PROMPT, 3)
    worker.save_refusal = BlockyardError(Reason.NEVER_FITS, "the disk is full")
    error = await refused(save(operator))
    assert error.reason is Reason.NEVER_FITS
    assert error.message == f"the worker at {worker.address}: the disk is full"
    assert await client.result(await client.add("r", PROMPT, max_tokens=5)) == oracle(PROMPT, 5)


async def test_a_replica_that_was_drained_stays_so(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    assert await client.result(await client.add("first", PROMPT, max_tokens=3)) == oracle(PROMPT, 3)
    await operator.drain("")
    await save(operator)
    [replica] = (await operator.status()).scheduler.replicas
    assert replica.drain_state
    assert not replica.ready


@pytest.mark.parametrize(
    ("folder", "save_format", "field"), [("", 1, "folder"), ("it", 0, "format"), ("it", 9, "format")]
)
async def test_what_is_not_said_is_refused(harness: Harness, folder: str, save_format: int, field: str) -> None:
    await harness.worker()
    await harness.scheduler()
    operator = await harness.operator()
    error = await refused(save(operator, folder, save_format))
    assert error.reason is Reason.FIELD_INVALID
    assert [violation.field for violation in error.violations] == [field]
