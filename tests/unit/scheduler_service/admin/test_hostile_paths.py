"""Paths and names that nobody means well with, at each rpc of the scheduler that takes one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2
from blockyard.errors import Reason
from tests.kit.hostile_paths import ALWAYS
from tests.kit.oracles.token_oracle import oracle
from tests.kit.refusals import refused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness

PROMPT = [1] * 20
LONG = "x" * 100_000


def requests(path: str) -> dict[str, Any]:
    """What takes a path or a revision, with this one."""
    return {
        "LoadLora": admin_pb2.LoadLoraRequest(name="a", path=path),
        "SaveState": admin_pb2.SaveStateRequest(folder=path, format=administration_pb2.STATE_FORMAT_PACKED),
        "UpdateWeights": admin_pb2.UpdateWeightsRequest(model=path, version="2"),
        "UpdateWeights, revision": admin_pb2.UpdateWeightsRequest(revision=path, version="2"),
    }


NAMES: dict[str, Any] = {
    "LoadLora": admin_pb2.LoadLoraRequest(name=LONG, path="a"),
    "PinLora": admin_pb2.PinLoraRequest(name=LONG),
    "UpdateWeights": admin_pb2.UpdateWeightsRequest(version=LONG),
    "UpdateWeights, revision": admin_pb2.UpdateWeightsRequest(version="2", revision="../../.."),
    "UpdateWeights, replicas": admin_pb2.UpdateWeightsRequest(version="2", replicas=[LONG]),
    "DrainReplica": admin_pb2.DrainReplicaRequest(replica=LONG),
    "SetLogLevel": admin_pb2.SetLogLevelRequest(process=LONG, level=administration_pb2.LOG_LEVEL_INFO),
}


async def test_no_path_and_no_name_ends_in_a_bug_or_costs_a_request_its_replica(
    harness: Harness, settings: Callable[..., SchedulerConfiguration]
) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler(settings(max_loras=1, lora_root="adapters"))
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", PROMPT, max_tokens=200)
    await client.wait_until(lambda: stream.token_ids[0])
    [before] = (await operator.status()).scheduler.replicas
    calls = {(name, what): request for what, path in ALWAYS.items() for name, request in requests(path).items()}
    calls |= {(name, "name"): request for name, request in NAMES.items()}
    for (name, what), request in calls.items():
        error = await refused(getattr(operator.stub, name.partition(",")[0])(request))
        assert error.reason in (Reason.FIELD_INVALID, Reason.MODEL_NOT_FOUND), (name, what)
        assert len(error.message) < 500, (name, what)
    await operator.stub.UnloadLora(admin_pb2.UnloadLoraRequest(name=LONG))
    status = (await operator.status()).scheduler
    assert (status.replicas[0].epoch, status.num_recoveries) == (before.epoch, 0)
    assert await client.result(stream) == oracle(PROMPT, 200)


@pytest.mark.parametrize("path", ["/etc", "../elsewhere", "/adapters-too/a"])
@pytest.mark.parametrize("root", ["adapters", "/adapters"])
async def test_an_adapter_lies_below_the_root_whether_that_is_relative_or_not(
    harness: Harness, settings: Callable[..., SchedulerConfiguration], root: str, path: str
) -> None:
    await harness.worker()
    await harness.scheduler(settings(max_loras=1, lora_root=root))
    await harness.client()
    error = await refused((await harness.operator()).load_lora("a", path))
    assert (error.reason, "--lora-root" in error.message) == (Reason.FIELD_INVALID, True)


async def test_a_relative_root_is_one_of_the_folder_that_the_scheduler_was_started_in(
    harness: Harness,
    settings: Callable[..., SchedulerConfiguration],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    await harness.worker()
    await harness.scheduler(settings(max_loras=1, lora_root="adapters"))
    await harness.client()
    operator = await harness.operator()
    for path in ("a", os.path.join(tmp_path, "adapters", "a")):
        assert (await operator.load_lora("a", path)).path == f"{tmp_path}/adapters/a"
