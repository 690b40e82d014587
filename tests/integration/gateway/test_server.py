from __future__ import annotations

import asyncio
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.configuration import ModelSettings, TextSettings
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.service.servers import PortTaken
from gateway.config import GatewayConfiguration
from gateway.server import Server, model_name
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.harness import DEMO_MODEL, configuration, demo_tokenizer, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        yield scheduler


@asynccontextmanager
async def running(configured: GatewayConfiguration) -> AsyncIterator[Server]:
    gateway = Server(configured)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()


@asynccontextmanager
async def channel_to(port: int) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


async def wait_for_health(port: int, status: Any, service: str = "") -> None:
    """Watches health until it has a status."""
    async with channel_to(port) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(10):
            async for answer in stub.Watch(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True):
                if answer.status == status:
                    return


async def test_both_fronts_answer_the_same(scheduler: FakeScheduler) -> None:
    async with running(configuration(scheduler)) as gateway:
        await wait_for_health(gateway.grpc_port, SERVING)
        async with channel_to(gateway.grpc_port) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            answer = await stub.Generate(inference_pb2.GenerateRequest(spec=spec(sampling={"seed": 4})))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}") as client:
            body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "seed": 4}
            response = await client.post("/v1/completions", json=body)
        assert response.json()["choices"][0]["text"] == answer.choices[0].text != ""


async def test_every_port_has_health_and_follows_the_scheduler(scheduler: FakeScheduler) -> None:
    async with running(configuration(scheduler)) as gateway:
        for port in (gateway.grpc_port, gateway.admin_port, gateway.monitoring.health_port):
            await wait_for_health(port, SERVING)
            await wait_for_health(port, SERVING, "liveness")
        await scheduler.tell_readiness(False, "gone")
        for port in (gateway.grpc_port, gateway.monitoring.health_port):
            await wait_for_health(port, NOT_SERVING, "readiness")
            await wait_for_health(port, SERVING, "liveness")


async def test_status_tells_the_gateway_and_the_scheduler(scheduler: FakeScheduler) -> None:
    async with running(configuration(scheduler)) as gateway, channel_to(gateway.admin_port) as channel:
        await wait_for_health(gateway.grpc_port, SERVING)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert status.gateway.ready and status.gateway.message == "" and status.gateway.gateway_id
        assert status.scheduler.num_gateways == 1
        await scheduler.stop()
        await wait_for_health(gateway.grpc_port, NOT_SERVING)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert not status.gateway.ready and status.gateway.message
        assert not status.HasField("scheduler")
        await scheduler.start()


async def test_reflection_lists_the_service(scheduler: FakeScheduler) -> None:
    async with running(configuration(scheduler)) as gateway, channel_to(gateway.grpc_port) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {"blockyard.inference.v1.InferenceService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("port", ["grpc_port", "http_port", "admin_port"])
async def test_a_taken_port_is_told(scheduler: FakeScheduler, port: str) -> None:
    configured = configuration(scheduler)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=str(number)):
            async with running(replace(configured, public=replace(configured.public, **{port: number}))):
                pass


async def test_draining_serves_on_but_is_not_ready(scheduler: FakeScheduler) -> None:
    scheduler.pause()
    async with running(configuration(scheduler)) as gateway, channel_to(gateway.grpc_port) as channel:
        await wait_for_health(gateway.grpc_port, SERVING)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(max_tokens=20)))
        assert (await call.read()).event.HasField("accepted")
        draining = asyncio.create_task(gateway.drain())
        await wait_for_health(gateway.grpc_port, NOT_SERVING)
        assert gateway.generation.readiness_message == "the gateway is stopping"
        assert not draining.done()
        scheduler.go_on()
        late = stub.Generate(inference_pb2.GenerateRequest(spec=spec()))
        events = []
        while (message := await call.read()) is not grpc.aio.EOF:
            events.append(message.event)
        assert events[-1].HasField("finished")
        assert (await late).choices
        async with asyncio.timeout(10):
            await draining


async def test_at_its_limit_a_drain_closes_what_is_left(scheduler: FakeScheduler) -> None:
    scheduler.pause()
    async with channel_to(0) as _, running(configuration(scheduler, drain_seconds=0.05)) as gateway:
        await wait_for_health(gateway.grpc_port, SERVING)
        async with channel_to(gateway.grpc_port) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = spec(max_tokens=20, request_id="mine")
            call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=request))
            await call.read()
            await gateway.drain()
            await gateway.stop()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
    error = from_rpc_error(raised.value)
    assert error.reason is Reason.DRAINING and error.retry_after_seconds == 1.0
    assert "resume it at another gateway" in error.message
    # Which is possible: the scheduler was not told to end it.
    await scheduler.wait_until(lambda: scheduler.num_gateways == 0)
    assert scheduler.aborted == []
    scheduler.go_on()
    async with running(configuration(scheduler)) as other, channel_to(other.grpc_port) as channel:
        await wait_for_health(other.grpc_port, SERVING)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        events = [m.event async for m in stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(request_id="mine"))]
        assert events[-1].finished.usage.num_completion_tokens == 20


async def test_a_drain_does_not_wait_for_what_nobody_reads(scheduler: FakeScheduler) -> None:
    scheduler.pause()
    async with running(configuration(scheduler)) as gateway, channel_to(gateway.grpc_port) as channel:
        await wait_for_health(gateway.grpc_port, SERVING)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = spec(on_disconnect=inference_pb2.ON_DISCONNECT_KEEP)
        call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=request))
        await call.read()
        call.cancel()
        async with asyncio.timeout(10):
            await gateway.drain()
        assert gateway.generation.num_requests == 1
    assert scheduler.aborted == []


@pytest.mark.parametrize(
    ("model", "served", "expected"),
    [
        ("", "", "demo"),
        ("/models/tiny-llama", "", "tiny-llama"),
        ("/models/tiny-llama/", "", "tiny-llama"),
        ("owner/name", "", "name"),
        ("owner/name", "mine", "mine"),
    ],
)
def test_the_model_has_the_name_of_its_folder(model: str, served: str, expected: str) -> None:
    configured = GatewayConfiguration(model=ModelSettings(model=model), text=TextSettings(served_model_name=served))
    assert model_name(configured) == expected


def test_a_model_that_cannot_be_read_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(BlockyardError) as raised:
        Server(GatewayConfiguration(model=ModelSettings(model=str(tmp_path))))
    assert raised.value.reason is Reason.MODEL_NOT_LOADED


async def start_process(*flags: str) -> asyncio.subprocess.Process:
    arguments = ["-m", "gateway", "--http-port", "0", "--admin-port", "0", "--model", str(DEMO_MODEL), *flags]
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stderr=asyncio.subprocess.PIPE, cwd=DEMO_MODEL.parents[1]
    )


async def read_until(process: asyncio.subprocess.Process, event: str) -> str:
    assert process.stderr is not None
    seen = ""
    async with asyncio.timeout(30):
        while line := (await process.stderr.readline()).decode():
            seen += line
            if event in line:
                return line
    raise AssertionError(f"the gateway ended without {event!r}: {seen}")


async def test_the_process_drains_on_sigterm(scheduler: FakeScheduler) -> None:
    scheduler.pause()
    process = await start_process("--grpc-port", "0", "--scheduler-address", scheduler.address)
    try:
        line = await read_until(process, "listening")
        port = int(line.split("grpc=127.0.0.1:")[1].split()[0])
        await read_until(process, "readiness ready=True")
        async with channel_to(port) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(max_tokens=5)))
            await call.read()
            process.send_signal(signal.SIGTERM)
            await read_until(process, "draining")
            scheduler.go_on()
            finished = False
            while (message := await call.read()) is not grpc.aio.EOF:
                finished = message.event.HasField("finished")
            assert finished
        await read_until(process, "stopped")
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_process_stops_at_once_on_a_second_signal(scheduler: FakeScheduler) -> None:
    scheduler.pause()
    process = await start_process("--grpc-port", "0", "--scheduler-address", scheduler.address)
    try:
        line = await read_until(process, "listening")
        await read_until(process, "readiness ready=True")
        async with channel_to(int(line.split("grpc=127.0.0.1:")[1].split()[0])) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(max_tokens=5)))
            await call.read()
            process.send_signal(signal.SIGINT)
            await read_until(process, "draining")
            process.send_signal(signal.SIGINT)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert from_rpc_error(raised.value).reason is Reason.DRAINING
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_taken_port_ends_the_process_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start_process("--grpc-port", str(taken.getsockname()[1]))
        _, written = await process.communicate()
    assert process.returncode == 1
    (line,) = written.decode().splitlines()
    assert "cannot listen on 127.0.0.1:" in line
