from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.service.servers import internal_channel
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.server import Server
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions
from tests.kit.fakes.token_client import TokenClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    import grpc.aio


@pytest.fixture
def configuration(sockets: str) -> SchedulerConfiguration:
    base = SchedulerConfiguration()
    return replace(
        base,
        model=replace(base.model, model="fake"),
        service=replace(
            base.service,
            scheduler_address=f"unix:{sockets}/scheduler",
            worker_address=f"unix:{sockets}/worker",
            debug_integrity=True,
            reattach_seconds=0.0,
        ),
    )


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[Server]:
    """Runs a server inside the test; what ended its engine ends the test."""
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        assert server.error is None


class Operator:
    """Asks the scheduler's AdminService."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)

    async def status(self) -> admin_pb2.GetStatusResponse:
        return await self.stub.GetStatus(admin_pb2.GetStatusRequest())

    async def drain(self, replica: str) -> admin_pb2.DrainReplicaResponse:
        return await self.stub.DrainReplica(admin_pb2.DrainReplicaRequest(replica=replica))

    async def sleep(self, replica: str = "", **fields: int) -> admin_pb2.SleepReplicaResponse:
        return await self.stub.SleepReplica(admin_pb2.SleepReplicaRequest(replica=replica, **fields))  # type: ignore[arg-type]

    async def wake(self, replica: str = "", **fields: object) -> admin_pb2.WakeReplicaResponse:
        return await self.stub.WakeReplica(admin_pb2.WakeReplicaRequest(replica=replica, **fields))  # type: ignore[arg-type]

    async def load_lora(self, name: str, path: str, *, load_inplace: bool = False) -> admin_pb2.LoraStatus:
        request = admin_pb2.LoadLoraRequest(name=name, path=path, load_inplace=load_inplace)
        return (await self.stub.LoadLora(request)).lora

    async def loras(self) -> list[admin_pb2.LoraStatus]:
        return list((await self.stub.ListLoras(admin_pb2.ListLorasRequest())).loras)

    async def undrain(self, replica: str) -> admin_pb2.UndrainReplicaResponse:
        return await self.stub.UndrainReplica(admin_pb2.UndrainReplicaRequest(replica=replica))


class Harness:
    """Starts workers, schedulers and clients of one test, and stops them in reverse."""

    def __init__(self, configuration: SchedulerConfiguration, stack: AsyncExitStack) -> None:
        self.configuration = configuration
        self._stack = stack

    async def worker(self, name: str = "", **options: object) -> FakeWorker:
        """A worker; one of several by its name."""
        address = self.configuration.service.worker_address + name
        worker = FakeWorker(FakeWorkerOptions(**options), address)  # type: ignore[arg-type]
        return await self._stack.enter_async_context(worker)

    async def scheduler(self, configuration: SchedulerConfiguration | None = None) -> Server:
        return await self._stack.enter_async_context(running(Server(configuration or self.configuration)))

    def running_scheduler(self) -> AbstractAsyncContextManager[Server]:
        """A scheduler that the test ends itself."""
        return running(Server(self.configuration))

    def gateway(self, gateway_id: str, window_bytes: int = 0) -> TokenClient:
        """A client that the test enters and leaves itself."""
        return TokenClient(self.configuration.service.scheduler_address, gateway_id, window_bytes)

    async def operator(self) -> Operator:
        channel = internal_channel(self.configuration.service.scheduler_address)
        self._stack.push_async_callback(channel.close)
        return Operator(channel)

    async def client(self, gateway_id: str = "gateway", *, ready: bool = True, window_bytes: int = 0) -> TokenClient:
        client = await self._stack.enter_async_context(self.gateway(gateway_id, window_bytes))
        if ready:
            await client.wait_until_ready()
        return client


@pytest.fixture
async def harness(configuration: SchedulerConfiguration) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        yield Harness(configuration, stack)


@pytest.fixture
def settings(configuration: SchedulerConfiguration) -> Callable[..., SchedulerConfiguration]:
    """Gives the configuration with some settings changed, whichever section they stand in."""

    def change(**changes: object) -> SchedulerConfiguration:
        changed = configuration
        for name, value in changes.items():
            for section in [field.name for field in fields(changed)]:
                part = getattr(changed, section)
                if hasattr(part, name):
                    changed = replace(changed, **{section: replace(part, **{name: value})})
                    break
            else:
                raise AssertionError(f"no setting {name}")
        return changed

    return change
