"""The Python examples run, against a real gateway whose scheduler makes its tokens up."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.configuration import ModelSettings, PublicSettings
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.server import Server
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def gateway() -> AsyncIterator[Server]:
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        gateway = Server(
            GatewayConfiguration(
                model=ModelSettings(model=str(DEMO_MODEL)),
                public=PublicSettings(grpc_port=0, http_port=0, admin_port=0),
                service=ServiceSettings(scheduler_address=scheduler.address),
            )
        )
        await gateway.start()
        try:
            await wait_until_ready(gateway)
            yield gateway
        finally:
            await gateway.stop()


async def wait_until_ready(gateway: Server) -> None:
    """Watches the gateway's health."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel, asyncio.timeout(20):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def run_example(name: str, address: str) -> str:
    """Runs an example as its user does, and returns what it writes."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / name), address),
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


async def test_the_client_library(gateway: Server) -> None:
    output = await run_example("python_client.py", f"127.0.0.1:{gateway.grpc_port}")
    assert "demo: up to 1024 tokens" in output
    assert "sampling.top_p: must be above 0" in output
    assert "stop.max_tokens: must be at least 1" in output


async def test_the_openai_package(gateway: Server) -> None:
    output = await run_example("openai_client.py", f"http://127.0.0.1:{gateway.http_port}")
    assert "model: demo" in output
    assert "completion_tokens=60" in output
    assert "400 FIELD_INVALID top_p" in output
