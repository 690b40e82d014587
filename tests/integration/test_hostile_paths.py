"""Paths that nobody means well with, through the real services: typed errors, while an answer goes on in its epoch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard import AsyncClient
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import administration_pb2
from blockyard.contract.events import Delta, Recovered
from blockyard.service.servers import internal_channel
from tests.kit.hostile_paths import ALWAYS, BELOW, PATHS, TYPED, lay_traps
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.system import System
from tests.kit.refusals import refused

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "qwen3"
FLAGS = ("--dtype", "bfloat16", "--max-loras", "2")


def load(path: str) -> Any:
    return admin_pb2.LoadLoraRequest(name="a", path=path)


def save(path: str) -> Any:
    return admin_pb2.SaveStateRequest(folder=path, format=administration_pb2.STATE_FORMAT_SHARDED)


def update(path: str) -> Any:
    return admin_pb2.UpdateWeightsRequest(model=path, version="2")


# What finds out only at the worker that a path cannot be has left its requests before: these go on afterwards.
BESIDE_STEPS = {
    "LoadLora": (load, PATHS),
    "SaveState": (save, {"empty": "", **ALWAYS}),
    "UpdateWeights": (update, ALWAYS),
}
BETWEEN_EPOCHS = {
    "SaveState": (save, ("below a link to itself", "a link out of the root", "upwards")),
    "UpdateWeights": (update, tuple(BELOW)),
}


async def test_no_path_costs_an_answer_its_epoch_or_a_worker_its_life(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lay_traps(root)
    make_tiny_adapter(root / "good", tiny_model(MODEL), 1)
    roots = [f for name in ("lora", "model", "save") for f in (f"--worker-{name}-root", str(root))]
    worker_flags, gateway_flags = ["--num-threads", "1", *roots], ["--gateway-lora-root", str(root)]
    with System(tiny_model(MODEL), tmp_path, FLAGS, worker_flags, gateway_flags) as system:
        async with (
            AsyncClient(system.grpc_target) as client,
            internal_channel(f"127.0.0.1:{system.port('admin')}") as channel,
        ):
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            begun, over = asyncio.Event(), asyncio.Event()

            async def follow() -> int:
                num_recoveries = 0
                while not over.is_set():
                    async for event in client.stream([5, 6, 7], max_tokens=64, temperature=0.0, ignore_eos=True):
                        num_recoveries += isinstance(event, Recovered)
                        if isinstance(event, Delta):
                            begun.set()
                return num_recoveries

            async def epoch() -> int:
                (replica,) = (await stub.GetStatus(admin_pb2.GetStatusRequest())).scheduler.replicas
                return replica.epoch

            following = asyncio.create_task(follow())
            await begun.wait()
            before = await epoch()
            for method, (make, paths) in BESIDE_STEPS.items():
                for name, path in paths.items():
                    error = await refused(getattr(stub, method)(make(path)))
                    assert error.reason in TYPED, (method, name, error)
            await stub.LoadLora(load("good"))
            assert await epoch() == before
            over.set()
            assert await following == 0
            for method, (make, names) in BETWEEN_EPOCHS.items():
                for name in names:
                    error = await refused(getattr(stub, method)(make(BELOW[name])))
                    assert error.reason in TYPED, (method, name, error)
            answer = await client.generate([5, 6, 7], max_tokens=8, model="a", ignore_eos=True, return_token_ids=True)
            assert len(answer.token_ids) == 8
        for service in system.services.values():
            assert "Traceback" not in service.log
