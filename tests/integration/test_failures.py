"""What goes wrong around the services: told clearly, and outlived where that is possible."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient, Client
from blockyard.errors import BlockyardError, Reason
from tests.kit.system import ROOT, Service, System
from tests.kit.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLAGS = ["--dtype", "float32", "--num-device-blocks", "40", "--num-host-blocks", "4"]


async def test_dead_worker_ends_its_streams_and_its_successor_serves(tmp_path: Path) -> None:
    with System(tiny_model("llama"), tmp_path, FLAGS) as system:
        async with AsyncClient(system.grpc_target) as client:
            before = await client.generate([5, 6, 7], max_tokens=8, temperature=0)
            stream = client.stream([5, 6, 7], max_tokens=900, ignore_eos=True)
            await anext(stream)
            await anext(stream)
            system.services["worker"].stop(signal.SIGKILL)
            with pytest.raises(BlockyardError) as raised:
                async for _ in stream:
                    pass
            assert raised.value.reason is Reason.NO_READY_WORKER
            system.start_service("worker")
            await asyncio.to_thread(system.wait_until_ready)
            after = await client.generate([5, 6, 7], max_tokens=8, temperature=0)
            assert after.text == before.text


def test_unreachable_worker_is_waited_for(tmp_path: Path) -> None:
    system = System(tiny_model("llama"), tmp_path, FLAGS)
    try:
        scheduler = system.start_service("scheduler")
        system.start_service("gateway")
        scheduler.wait_for_log("no worker answers")
        system.services["gateway"].wait_for_log("no worker answers")
        with Client(system.grpc_target) as client, pytest.raises(BlockyardError) as raised:
            client.generate("x", max_tokens=1, timeout=2.0)
        assert raised.value.reason is Reason.NO_READY_WORKER
        assert "no worker answers" in raised.value.message
        system.start_service("worker")
        system.wait_until_ready()
        with Client(system.grpc_target) as client:
            assert client.generate("x", max_tokens=2, ignore_eos=True).usage.num_completion_tokens == 2
    finally:
        system.__exit__()


@pytest.mark.parametrize("flag", ["--grpc-port", "--http-port", "--admin-port"])
def test_taken_port_is_an_error(flag: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--grpc-port": "0", "--http-port": "0", "--admin-port": "0", flag: str(taken.getsockname()[1])}
        arguments = [part for pair in ports.items() for part in pair]
        model = ["--model", str(ROOT / "models" / "demo"), "--scheduler-address", f"unix:{tmp_path}/s"]
        gateway = Service("gateway", [*model, *arguments], tmp_path / "log")
        assert gateway.wait() == 1
        assert str(taken.getsockname()[1]) in gateway.log
        assert "Traceback" not in gateway.log


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()


def change_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["UnheardOfForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("llama", truncate_weights, r"model\.safetensors"),
        ("llama_sharded", remove_shard, r"model-0000\d-of-0000\d\.safetensors"),
        ("llama", change_architecture, r"UnheardOfForCausalLM.*LlamaForCausalLM"),
    ],
)
def test_damaged_weights_are_told_and_the_repaired_folder_loads(
    kind: str, damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """Nobody is ready, everybody says why, and nobody ends."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model(kind), model)
    damage(model)
    system = System(model, tmp_path / "logs", FLAGS)
    try:
        for name in ("worker", "scheduler", "gateway"):
            system.start_service(name)
        system.services["gateway"].wait_for_log(rf"ready=False .*{message}")
        assert all(service.process.poll() is None for service in system.services.values())
        shutil.rmtree(model)
        shutil.copytree(tiny_model(kind), model)
        if damage is not change_architecture:  # a gateway reads config.json once, when it starts
            system.wait_until_ready()
    finally:
        system.__exit__()


@pytest.mark.parametrize("module", ["gateway", "scheduler_service"])
def test_folder_without_config_is_an_error_at_once(module: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), model)
    remove_config(model)
    addresses = {
        "gateway": ["--grpc-port", "0", "--http-port", "0", "--admin-port", "0"],
        "scheduler_service": ["--worker-address", f"unix:{tmp_path}/w"],
    }[module]
    flags = ["--model", str(model), "--scheduler-address", f"unix:{tmp_path}/s", *addresses]
    service = Service(module, flags, tmp_path / "log")
    if module == "gateway":
        assert service.wait() == 1
        assert "config.json" in service.log
        assert "Traceback" not in service.log
    else:
        # A scheduler needs no file of the model: its worker tells what is missing.
        service.wait_for_log("not ready")
        service.stop()
