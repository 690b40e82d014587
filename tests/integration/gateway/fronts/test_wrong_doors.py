"""Who mistakes a port, or TLS, is told which door this is: by the server where it can, else by the client's library."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.client.access import ClientTls
from blockyard.client.asynchronous import AsyncClient
from blockyard.client.retry import RetryPolicy
from blockyard.configuration import ModelSettings, PublicSettings, SecuritySettings
from blockyard.errors import BlockyardError, from_rpc_error
from blockyard.load.http_stream import get_json
from blockyard.local.supervisor import ROOT
from blockyard.wrong_doors import is_wrong_door
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.fronts import wrong_doors
from gateway.fronts.http.access import BoundedProtocol
from gateway.server import Server
from tests.kit.authority import Authority
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


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says it now and then only, over all connections of a process."""
    monkeypatch.setattr(BoundedProtocol, "wrong_doors", wrong_doors.WrongDoorLog())


async def test_a_grpc_client_at_the_http_port(plain: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        told = await told_to_a_client(plain.http_port)
    assert told.startswith(f"127.0.0.1:{plain.http_port} answers in HTTP/1.1: use the gRPC port (50051")
    assert is_wrong_door(told)
    assert "a gRPC client called the HTTP port" in caplog.text


async def test_a_tls_client_at_a_port_without_tls(plain: Server, caplog: pytest.LogCaptureFixture) -> None:
    for port in (plain.grpc_port, plain.http_port, plain.admin_port):
        told = await told_to_a_client(port, tls=True)
        assert told == f"127.0.0.1:{port} speaks no TLS: connect without it (no --tls, no tls=True)"
        assert is_wrong_door(told)
    assert "a client spoke TLS to the HTTP port, which has none" in caplog.text


async def test_a_client_without_tls_at_a_port_that_asks_for_it(tls: tuple[Server, ClientTls]) -> None:
    for port in (tls[0].grpc_port, tls[0].http_port, tls[0].admin_port):
        told = await told_to_a_client(port)
        assert told == f"127.0.0.1:{port} closed the connection at once, as a server that asks for TLS does: " + (
            "try --tls (tls=True)"
        )
        assert is_wrong_door(told)


async def test_a_grpc_client_with_tls_at_the_https_port(tls: tuple[Server, ClientTls]) -> None:
    told = await told_to_a_client(tls[0].http_port, tls=tls[1])
    assert told.startswith(f"127.0.0.1:{tls[0].http_port} speaks TLS but not gRPC, as an HTTP port does: use the gRPC")


@pytest.mark.parametrize(
    ("change", "meaning"),
    [
        ({"authority": ""}, "shows a certificate that no known authority has signed: name the authority"),
        ({"server_name": "other"}, "shows a certificate of another name: say which is expected"),
    ],
)
async def test_a_certificate_that_is_not_trusted(
    tls: tuple[Server, ClientTls], change: dict[str, str], meaning: str
) -> None:
    told = await told_to_a_client(tls[0].grpc_port, tls=replace(tls[1], **change))
    assert told.startswith(f"127.0.0.1:{tls[0].grpc_port} {meaning}")


async def test_a_public_call_at_the_admin_port_and_the_reverse(plain: Server) -> None:
    told = await told_to_a_client(plain.admin_port)
    assert told == f"this is the admin port: the public API is on port {plain.grpc_port}"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plain.grpc_port}") as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(admin_pb2.GetStatusRequest())
    error = from_rpc_error(caught.value)
    assert error.message == f"this is the gRPC port: the admin API is on port {plain.admin_port}"


async def test_an_unknown_method_is_no_riddle(plain: Server) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{plain.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/some.Service/Method")(b"")
    assert "it is another service, or an older version" in from_rpc_error(caught.value).message


async def test_http_at_a_grpc_port_and_tls_where_there_is_none(plain: Server, tls: tuple[Server, ClientTls]) -> None:
    for url, told in (
        (f"http://127.0.0.1:{plain.grpc_port}", "answers in gRPC: use the HTTP port (8000 unless --http-port says"),
        (f"http://127.0.0.1:{plain.admin_port}", "answers in gRPC: use the HTTP port"),
        (f"https://127.0.0.1:{plain.http_port}", "speaks no TLS: use http:// instead of https://"),
        (f"http://127.0.0.1:{tls[0].http_port}", "closed the connection without an answer, as a server that asks"),
    ):
        with pytest.raises(BlockyardError) as caught:
            await get_json(f"{url}/v1/models")
        assert caught.value.message.startswith(f"{url.partition('//')[2]} {told}")
        assert is_wrong_door(caught.value.message)


async def test_the_command_says_which_door_it_is_and_not_that_nobody_answers(plain: Server) -> None:
    command = ["top", "--once", "--admin-address", f"127.0.0.1:{plain.http_port}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "blockyard", *command), cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert errors.decode().startswith(f"error: 127.0.0.1:{plain.http_port} answers in HTTP/1.1: use the gRPC port")


def test_the_log_is_not_filled_by_who_knocks(caplog: pytest.LogCaptureFixture) -> None:
    log = wrong_doors.WrongDoorLog()
    for _ in range(100):
        log.note("wrong")
    assert len(caplog.records) == 1
