"""One question to all workers of a replica: answers by rank, the ranks that are missing, the first that refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2
from scheduler_service.admin import servicer
from scheduler_service.admin.servicer import ask_each
from tests.kit.refusals import refused
from tests.unit.scheduler_service.replicas.test_ranks import group_of

if TYPE_CHECKING:
    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.replicas.rank import Rank
    from tests.unit.scheduler_service.conftest import Harness


async def extend(ranks: list[Rank], operation: str, seconds: float = 10.0) -> list[bytes]:
    request = worker_pb2.CallExtensionRequest(operation=operation, payload=b"ab")
    return [answer.result for answer in await ask_each(ranks, "CallExtension", request, seconds)]


async def test_answers_come_by_rank_or_not_at_all(
    configuration: SchedulerConfiguration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "GRACE_SECONDS", 0.05)
    async with group_of(configuration, 4) as group:
        for _ in range(4):
            await group.start()
        ranks = group.replica.ranks
        assert await extend(ranks, "o") == [b"ba"] * 4

        for rank in (2, 3):
            group.workers[rank].refuses_extensions = True
        with pytest.raises(BlockyardError) as caught:
            await extend(ranks, "o")
        assert caught.value.reason is Reason.EXTENSION_FAILED
        assert caught.value.message == f"rank 2 ({ranks[2].address}): it failed"

        for rank in (1, 3):
            group.workers[rank].hangs_in_extensions = True
        with pytest.raises(BlockyardError) as caught:
            await extend(ranks, "o", 0.05)
        assert caught.value.reason is Reason.OPERATION_DEADLINE
        names = " and ".join(f"{rank} ({ranks[rank].address})" for rank in (1, 3))
        assert caught.value.message == f"no answer within 0.05 s of rank {names}"

        await group.workers[0].kill()
        with pytest.raises(BlockyardError) as caught:
            await extend(ranks[:1], "o")
        assert caught.value.reason is Reason.NO_READY_WORKER


async def test_an_operator_has_workers_do_things(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    await harness.client()
    stub = (await harness.operator()).stub
    names = {"extension": "e", "operation": "o"}
    request = admin_pb2.CallExtensionRequest(replica="0", payload=b"xy", timeout={"seconds": 3}, **names)
    [told] = (await stub.CallExtension(request)).results
    assert (told.rank, told.address, told.result) == (0, worker.address, b"yx")
    [asked] = worker.called
    assert (asked.extension, asked.operation, asked.timeout.seconds) == ("e", "o", 3)
    request = admin_pb2.CallExtensionRequest(timeout={"seconds": 300}, **names)
    error = await refused(stub.CallExtension(request))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "timeout")
