"""What the tests of the shared package need: a fake gateway in several ways, and the files of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from blockyard.local.local_system import LocalSystem
from blockyard.local.supervisor import Service
from tests.kit.fakes.fake_gateway import FakeGateway

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with FakeGateway().in_thread() as running:
        yield running


@pytest.fixture
async def async_gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as running:
        yield running


# Takes the place of all three services: it listens where the gateway's flags say.
GATEWAY = """
import asyncio, signal, sys
from tests.kit.fakes.fake_gateway import FakeGateway

async def main():
    told = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:] if "=" in flag)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    gateway = FakeGateway()
    await gateway.start(int(told["grpc-port"]), told["gateway-local-address"])
    print("listening", file=sys.stderr, flush=True)
    await stop.wait()
    await gateway.stop()

asyncio.run(main())
"""


@pytest.fixture
def fake_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a local system of one process, which is a fake gateway; returns the folder of its module."""
    (tmp_path / "stand_in_gateway.py").write_text(GATEWAY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    real = LocalSystem.make_services

    def services(self: LocalSystem) -> list[Service]:
        return [Service("gateway", "stand_in_gateway", real(self)[-1].flags)]

    monkeypatch.setattr(LocalSystem, "make_services", services)
    return tmp_path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model's folder as hubs have it, with much that no service needs."""
    folder = tmp_path / "repository"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"name": name}))
    for name in (
        "model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/params.json",
        "checkpoint-9/model.safetensors",
        "checkpoint-9/tokenizer.json",
        "tokenizer_code.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    return folder
