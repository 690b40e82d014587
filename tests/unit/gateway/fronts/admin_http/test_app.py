"""vLLM's calls for operators, over HTTP, as AdminService gets them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason
from gateway.fronts.admin_http.app import make_admin_app


class Administration:
    """AdminService of a system with two replicas, which takes note."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: BlockyardError | None = None
        self.reading = admin_pb2.GetStatusResponse()
        for number in range(2):
            self.reading.scheduler.replicas.add(replica_id=number).workers.add(state=status_pb2.WORKER_STATE_RUNNING)

    async def status(self, model: str) -> admin_pb2.GetStatusResponse:
        return self.reading

    async def pass_on(self, method: str, request: Any, model: str) -> None:
        assert f"{method}Request" == type(request).__name__
        await self.load_lora(request, model)

    async def load_lora(self, request: Any, model: str) -> None:
        self.asked.append(request)
        if self.error:
            raise self.error

    unload_lora = load_lora


@pytest.fixture
def administration() -> Administration:
    return Administration()


async def call(administration: Administration, method: str, path: str, body: Any = None) -> httpx.Response:
    transport = httpx.ASGITransport(make_admin_app(administration))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        return await client.request(method, path, json=body)


async def test_all_replicas_sleep_and_wake(administration: Administration) -> None:
    assert (await call(administration, "POST", "/sleep?level=2&mode=abort")).status_code == 200
    abort = admin_pb2.LEAVE_MODE_ABORT
    assert administration.asked == [
        admin_pb2.SleepReplicaRequest(replica=name, level=2, mode=abort) for name in ("0", "1")
    ]
    administration.asked.clear()
    path = "/wake_up?tags=weights&tags=kv_cache&reload=true&replica=1"
    assert (await call(administration, "POST", path)).status_code == 200
    tags = [administration_pb2.MEMORY_TAG_WEIGHTS, administration_pb2.MEMORY_TAG_KV_CACHE]
    assert administration.asked == [admin_pb2.WakeReplicaRequest(replica="1", tags=tags, reload=True)]


async def test_it_tells_whether_all_are_asleep(administration: Administration) -> None:
    assert (await call(administration, "GET", "/is_sleeping")).json() == {"is_sleeping": False}
    for replica in administration.reading.scheduler.replicas:
        replica.workers[0].state = status_pb2.WORKER_STATE_SLEEPING
    assert (await call(administration, "GET", "/is_sleeping")).json() == {"is_sleeping": True}


async def test_errors_are_told_as_elsewhere(administration: Administration) -> None:
    assert (await call(administration, "POST", "/sleep?level=3")).status_code == 422
    administration.error = BlockyardError(Reason.WRONG_STATE, "something runs")
    answer = await call(administration, "POST", "/sleep")
    assert (answer.status_code, answer.json()["error"]["message"]) == (412, "something runs")
    administration.reading.ClearField("scheduler")
    assert (await call(administration, "POST", "/wake_up")).status_code == 503


async def test_adapters_are_loaded_and_unloaded(administration: Administration) -> None:
    body = {"lora_name": "sql", "lora_path": "/adapters/sql", "load_inplace": True}
    answer = await call(administration, "POST", "/v1/load_lora_adapter", body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    answer = await call(administration, "POST", "/v1/unload_lora_adapter", {"lora_name": "sql", "lora_int_id": 3})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert administration.asked == [
        admin_pb2.LoadLoraRequest(name="sql", path="/adapters/sql", load_inplace=True),
        admin_pb2.UnloadLoraRequest(name="sql"),
    ]
    assert (await call(administration, "POST", "/v1/load_lora_adapter", {"lora_name": "sql"})).status_code == 422
    answer = await call(administration, "POST", "/v1/load_lora_adapter", body | {"long_lora_max_len": 8192})
    assert answer.status_code == 400
    assert "long_lora_max_len: must be 0 or absent" in answer.json()["error"]["message"]
    assert (await call(administration, "POST", "/v1/load_lora_adapter", body | {"long_lora_max_len": 0})).is_success
    administration.error = BlockyardError(Reason.MODEL_NOT_LOADED, "it is a DoRA")
    answer = await call(administration, "POST", "/v1/load_lora_adapter", body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (412, "it is a DoRA")


@pytest.mark.parametrize("field", ["lora_name", "lora_path"])
@pytest.mark.parametrize("method", ["load", "unload"])
async def test_half_a_surrogate_pair_is_refused(administration: Administration, method: str, field: str) -> None:
    """JSON can say it, and no message holds it."""
    body = json.dumps({"lora_name": "a", "lora_path": "a"} | {field: "\ud800"})
    transport = httpx.ASGITransport(make_admin_app(administration))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        headers = {"content-type": "application/json"}
        answer = await client.post(f"/v1/{method}_lora_adapter", content=body, headers=headers)
    # What unloading does not read does not matter.
    is_read = (method, field) != ("unload", "lora_path")
    assert answer.status_code == (400 if is_read else 200)
