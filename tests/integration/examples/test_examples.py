"""The Python examples run, against a real gateway whose scheduler makes its tokens up."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.configuration import ModelSettings, PublicSettings
from gateway.config import GatewayConfiguration, ServiceSettings, TextSettings
from gateway.server import Server
from tests.kit.fakes.fake_scheduler import FakeScheduler, Script, hashed_tokens
from tests.unit.gateway.harness import DEMO_MODEL, END_OF_TURN, demo_tokenizer, ids_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from blockyard.scheduler.v1 import scheduler_pb2

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def gateway() -> AsyncIterator[Server]:
    async with running_gateway() as server:
        yield server


@asynccontextmanager
async def running_gateway(chat_template: str = "", script: Script = hashed_tokens) -> AsyncGenerator[Server, None]:
    """A gateway of the demo model, on a scheduler that follows a script."""
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest, script=script) as scheduler:
        gateway = Server(
            GatewayConfiguration(
                model=ModelSettings(model=str(DEMO_MODEL)),
                text=TextSettings(chat_template=chat_template),
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


def in_turns(*texts: str) -> Script:
    """A script of these texts, one for each request."""
    answers: dict[str, list[int]] = {}
    rest = [ids_of(text) for text in texts]

    def script(request: scheduler_pb2.AddRequest, _index: int, position: int) -> int:
        if request.request_id not in answers:
            answers[request.request_id] = rest.pop(0)
        answer = answers[request.request_id]
        return answer[position] if position < len(answer) else END_OF_TURN

    return script


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


async def test_an_agent() -> None:
    call = '{"name": "temperature", "parameters": {"city": "Oslo"}}'
    script = in_turns(call, "It is 4 degrees.", '{"coat": "thick", "layers": 3}')
    async with running_gateway(str(ROOT / "examples" / "tools.jinja"), script) as gateway:
        output = await run_example("agent.py", f"http://127.0.0.1:{gateway.http_port}")
    assert output.splitlines() == [
        'calls temperature({"city": "Oslo"})',
        "says 'It is 4 degrees.'",
        "parsed Clothes(coat='thick', layers=3)",
    ]
