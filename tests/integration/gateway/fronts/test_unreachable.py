"""A client that mistakes the port, TLS or the certificate is told what to try."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from blockyard.client.access import ClientTls
from blockyard.client.asynchronous import AsyncClient
from blockyard.client.retry import RetryPolicy
from blockyard.configuration import ModelSettings, PublicSettings, SecuritySettings
from blockyard.errors import BlockyardError
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.server import Server
from tests.kit.authority import Authority
from tests.kit.processes.nursery import run_command
from tests.unit.gateway.harness import DEMO_MODEL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.kit.fakes.fake_scheduler import FakeScheduler

ONCE = RetryPolicy(max_attempts=1)


@asynccontextmanager
async def running(scheduler: FakeScheduler, security: SecuritySettings) -> AsyncIterator[Server]:
    configuration = GatewayConfiguration(
        model=ModelSettings(model=str(DEMO_MODEL)),
        public=PublicSettings(grpc_port=0, http_port=0, admin_port=0),
        security=security,
        service=ServiceSettings(scheduler_address=scheduler.address),
    )
    gateway = Server(configuration)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()


@pytest.fixture
async def plain(scheduler: FakeScheduler) -> AsyncIterator[Server]:
    async with running(scheduler, SecuritySettings()) as gateway:
        yield gateway


@pytest.fixture
async def tls(scheduler: FakeScheduler, tmp_path: Path) -> AsyncIterator[tuple[Server, ClientTls]]:
    authority = Authority(tmp_path / "pki")
    pair = authority.issue("server")
    security = SecuritySettings(tls_certificate=str(pair.certificate), tls_key=str(pair.key))
    async with running(scheduler, security) as gateway:
        yield gateway, ClientTls(authority=str(authority.certificate), server_name="server")


async def told_to_a_client(port: int, tls: ClientTls | bool = False) -> str:
    """What the client library raises where a client of the public API calls a port."""
    async with AsyncClient(f"127.0.0.1:{port}", tls=tls, retry=ONCE) as client:
        with pytest.raises(BlockyardError) as caught:
            await client.list_models()
    return caught.value.message


async def test_a_grpc_client_at_the_http_port(plain: Server) -> None:
    assert (await told_to_a_client(plain.http_port)).endswith(": this is an HTTP port, use the gRPC port")


async def test_a_tls_client_at_a_port_without_tls(plain: Server) -> None:
    for port in (plain.grpc_port, plain.http_port, plain.admin_port):
        told = await told_to_a_client(port, tls=True)
        assert told.endswith(": the server has no TLS, connect without it (no --tls, no tls=True)")


async def test_a_client_without_tls_at_a_port_that_asks_for_it(tls: tuple[Server, ClientTls]) -> None:
    for port in (tls[0].grpc_port, tls[0].http_port, tls[0].admin_port):
        assert (await told_to_a_client(port)).endswith(": the server may ask for TLS, try --tls (tls=True)")


async def test_a_grpc_client_with_tls_at_the_https_port(tls: tuple[Server, ClientTls]) -> None:
    told = await told_to_a_client(tls[0].http_port, tls=tls[1])
    assert told.endswith(": this is an HTTP port, use the gRPC port")


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"authority": ""}, "name the authority of the server's certificate"),
        ({"server_name": "other"}, "name the server as its certificate does"),
    ],
)
async def test_a_certificate_that_is_not_trusted(
    tls: tuple[Server, ClientTls], change: dict[str, str], advice: str
) -> None:
    told = await told_to_a_client(tls[0].grpc_port, tls=replace(tls[1], **change))
    assert f": {advice} (--tls-" in told


async def test_a_public_call_at_the_admin_port(plain: Server) -> None:
    assert await told_to_a_client(plain.admin_port) == (
        "Method not found!: the server is another service, or an older version"
    )


async def test_the_command_prints_the_advice(plain: Server) -> None:
    command = ["top", "--once", "--admin-address", f"127.0.0.1:{plain.http_port}"]
    done = await asyncio.to_thread(run_command, command, os.environ)
    assert done.returncode == 1
    assert "use the gRPC port" in done.stderr
