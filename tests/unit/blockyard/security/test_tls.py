"""Certificates on real connections: over gRPC and HTTP, wrong ones, and those that change under running streams."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives import serialization
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.configuration import InternalSecuritySettings
from blockyard.security.identity import InternalIdentity
from blockyard.security.tls import CertificateError, CertificateFiles, Peer, http_context, server_credentials
from blockyard.service import servers as rpc
from blockyard.service.health import add_health
from tests.kit.authority import Authority, Pair, trust

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

WORKER, SCHEDULER, GATEWAY = "worker.blockyard", "scheduler.blockyard", "gateway.blockyard"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


def files_of(pair: Pair, authority: Path | None = None) -> CertificateFiles:
    return CertificateFiles(str(pair.certificate), str(pair.key), str(authority or ""))


@asynccontextmanager
async def serving(files: CertificateFiles, is_ready: Callable[[], bool] = lambda: True) -> AsyncIterator[str]:
    """A server with health only; gives its address."""
    server = rpc.make_server(1000, [])
    add_health(server, is_ready, lambda: True)
    port = rpc.bind(server, "127.0.0.1:0", server_credentials(files))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def check(channel: grpc.aio.Channel, **options: Any) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5, **options)


async def is_answered(address: str, peer: Peer | None) -> bool:
    async with rpc.internal_channel(address, peer) as channel:
        try:
            await check(channel)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True


async def test_services_know_each_other(authority: Authority) -> None:
    ours = authority.issue("worker", names=[WORKER])
    async with serving(files_of(ours, authority.certificate)) as address:
        theirs = files_of(authority.issue("scheduler", names=[SCHEDULER]), authority.certificate)
        assert await is_answered(address, Peer(theirs, WORKER))


async def test_another_service_in_its_place_is_not_called(authority: Authority) -> None:
    ours = authority.issue("worker", names=[WORKER])
    async with serving(files_of(ours, authority.certificate)) as address:
        theirs = files_of(authority.issue("gateway", names=[GATEWAY]), authority.certificate)
        assert not await is_answered(address, Peer(theirs, SCHEDULER))


async def test_a_plain_client_is_not_answered(authority: Authority) -> None:
    ours = authority.issue("worker", names=[WORKER])
    async with serving(files_of(ours, authority.certificate)) as address:
        assert not await is_answered(address, None)


@pytest.mark.parametrize("wrong", ["other authority", "expired", "not yet trusted server"])
async def test_a_wrong_certificate_is_refused(authority: Authority, tmp_path: Path, wrong: str) -> None:
    other = Authority(tmp_path / "other", "other")
    ours = authority.issue("worker", names=[WORKER])
    signer = other if wrong == "other authority" else authority
    theirs = signer.issue(
        "scheduler", names=[SCHEDULER], valid=timedelta(days=-1 if wrong == "expired" else 1), folder=tmp_path
    )
    trusted = other.certificate if wrong == "not yet trusted server" else authority.certificate
    async with serving(files_of(ours, authority.certificate)) as address:
        assert not await is_answered(address, Peer(files_of(theirs, trusted), WORKER))


async def test_an_expired_server_is_not_called(authority: Authority, tmp_path: Path) -> None:
    ours = authority.issue("worker", names=[WORKER], valid=timedelta(days=-1))
    theirs = files_of(authority.issue("scheduler", names=[SCHEDULER]), authority.certificate)
    async with serving(files_of(ours, authority.certificate)) as address:
        assert not await is_answered(address, Peer(theirs, WORKER))


async def test_a_stream_outlives_the_certificates_that_it_began_with(authority: Authority) -> None:
    """Both end in the midst: nobody gets in any more, and who is in stays."""
    valid = timedelta(seconds=2)
    ours = files_of(authority.issue("worker", names=[WORKER], valid=valid), authority.certificate)
    peer = Peer(files_of(authority.issue("scheduler", names=[SCHEDULER], valid=valid), authority.certificate), WORKER)
    ready = asyncio.Event()
    async with (
        serving(ours, ready.is_set) as address,
        rpc.internal_channel(address, peer) as channel,
        asyncio.timeout(20),
    ):
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        reading = asyncio.create_task(watch.read())
        while await is_answered(address, peer):
            await asyncio.wait({reading}, timeout=0.1)
        ready.set()
        assert (await reading).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_a_server_takes_a_new_certificate_and_running_streams_go_on(authority: Authority, tmp_path: Path) -> None:
    second = Authority(tmp_path / "second", "second")
    trusted = tmp_path / "trusted.pem"
    trust(trusted, authority)
    pair = authority.issue("worker", names=[WORKER], folder=tmp_path)
    first_peer = Peer(files_of(authority.issue("scheduler", names=[SCHEDULER]), authority.certificate), WORKER)
    ready = asyncio.Event()
    async with (
        serving(files_of(pair, trusted), ready.is_set) as address,
        rpc.internal_channel(address, first_peer) as channel,
        asyncio.timeout(20),
    ):
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        # Everything changes: the authority, the certificate, the key.
        trust(trusted, second)
        second.issue("worker", names=[WORKER], folder=tmp_path)
        new_peer = Peer(files_of(second.issue("scheduler", names=[SCHEDULER]), second.certificate), WORKER)
        assert await is_answered(address, new_peer)
        assert not await is_answered(address, first_peer)
        # The connection that was there goes on, and so does the stream on it.
        ready.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await check(channel)
        watch.cancel()


async def test_a_client_shows_its_new_certificate_and_its_streams_go_on(authority: Authority, tmp_path: Path) -> None:
    ours = files_of(authority.issue("worker", names=[WORKER]), authority.certificate)
    theirs = files_of(authority.issue("scheduler", names=[SCHEDULER], folder=tmp_path), authority.certificate)
    async with serving(ours) as address, asyncio.timeout(20):
        renewed = rpc.RenewedChannel(address, Peer(theirs, WORKER))
        first = renewed.get()
        assert renewed.get() is first
        watch: Any = health_pb2_grpc.HealthStub(first).Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        before = theirs.current().version
        authority.issue("scheduler", names=[SCHEDULER], folder=tmp_path)
        second = renewed.get()
        assert second is not first
        assert theirs.current().version > before
        # Nobody holds the first channel any more, but for its stream.
        del first
        assert await check(second)
        assert not watch.done()
        await renewed.close()
        watch.cancel()


def test_without_a_certificate_a_renewed_channel_is_one_channel() -> None:
    async def use() -> None:
        renewed = rpc.RenewedChannel("127.0.0.1:1")
        assert renewed.get() is renewed.get()
        await renewed.close()

    asyncio.run(use())


@pytest.mark.parametrize("broken", ["another key", "no certificate", "gone", "half written"])
def test_what_cannot_be_used_leaves_the_last_one(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    pair = authority.issue("server", folder=tmp_path)
    files = files_of(pair)
    first = files.current()
    if broken == "another key":
        shutil.copy(authority.issue("other").key, pair.key)
    elif broken == "no certificate":
        pair.certificate.write_text("nothing")
    elif broken == "gone":
        pair.certificate.unlink()
    else:
        pair.certificate.write_bytes(pair.certificate.read_bytes()[:200])
    with caplog.at_level(logging.WARNING):
        assert files.current() is first
        assert files.current() is first
    assert len(caplog.records) == 1, "told once for each change"
    authority.issue("server", folder=tmp_path)
    assert files.current().version == first.version + 1


def test_a_change_behind_a_link_is_seen(authority: Authority, tmp_path: Path) -> None:
    """As Kubernetes does it: the files are links through a link to a folder, which is replaced."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        authority.issue("tls", folder=tmp_path / name)
    (tmp_path / "data").symlink_to("one")
    pair = Pair(tmp_path / "tls.pem", tmp_path / "tls.key")
    for file in (pair.certificate, pair.key):
        file.symlink_to(f"data/{file.name}")
    files = files_of(pair)
    assert files.current().chain == (tmp_path / "one/tls.pem").read_bytes()
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert files.current().chain == (tmp_path / "two/tls.pem").read_bytes()


def test_what_cannot_be_used_at_the_start_is_an_error_that_names_it(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue("one"), authority.issue("two")
    for chain, key, trusted, told in (
        (tmp_path / "none.pem", pair.key, "", "none.pem: No such file"),
        (pair.certificate, other.key, "", "one.pem and .*two.key are no certificate with its key"),
        (pair.key, pair.key, "", "are no certificate with its key"),
        (pair.certificate, pair.key, tmp_path / "nobody.pem", "nobody.pem: No such file"),
        (pair.certificate, pair.key, pair.key, "one.key has no certificate of an authority"),
    ):
        with pytest.raises(CertificateError, match=told):
            CertificateFiles(str(chain), str(key), str(trusted))


def test_a_key_with_a_passphrase_is_refused_without_a_question(authority: Authority) -> None:
    pair = authority.issue("one")
    key: Any = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    form = serialization.PrivateFormat.PKCS8
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    with pytest.raises(CertificateError, match="passphrase"):
        files_of(pair)


# HTTP.


@asynccontextmanager
async def echo(files: CertificateFiles) -> AsyncIterator[int]:
    """A server over TLS that tells each line back; gives its port."""

    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(end := asyncio.Event())
        try:
            while line := await reader.readline():
                writer.write(line)
            writer.close()
        finally:
            end.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=http_context(files))
    async with server:
        yield server.sockets[0].getsockname()[1]
    for end in ended:
        await end.wait()


class Line:
    """A connection over TLS that checks who answers."""

    def __init__(
        self, port: int, authority: Path, pair: Pair | None = None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ) -> None:
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.maximum_version = version
        if pair:
            self._context.load_cert_chain(pair.certificate, pair.key)
        self._port = port

    async def __aenter__(self) -> Line:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context)
        self.name = self._writer.get_extra_info("peercert")["subject"][0][0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def says(self, line: bytes) -> bytes:
        """Sends a line, and gives the answer; empty from a server that has closed."""
        self._writer.write(line)
        try:
            return await self._reader.readline()
        except (ssl.SSLError, ConnectionError):
            return b""


async def test_an_http_server_takes_a_new_certificate_and_its_connections_go_on(
    authority: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("server", common_name="first", folder=tmp_path)
    async with echo(files_of(pair)) as port, asyncio.timeout(20), Line(port, authority.certificate) as first:
        assert first.name == "first"
        authority.issue("server", common_name="second", folder=tmp_path)
        async with Line(port, authority.certificate) as second:
            assert second.name == "second"
            assert await second.says(b"new\n") == b"new\n"
        assert await first.says(b"old\n") == b"old\n"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_an_http_server_asks_for_certificates_of_the_authority_of_now(
    authority: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    other = Authority(tmp_path / "other", "other")
    trusted = tmp_path / "trusted.pem"
    trust(trusted, authority)
    expired = authority.issue("expired", valid=timedelta(days=-1))
    shown = (authority.issue("mine"), other.issue("others"), expired, None)
    server = authority.issue("server")

    async def answers(port: int, pair: Pair | None) -> bool:
        try:
            async with Line(port, authority.certificate, pair, version) as line:
                return await line.says(b"hello\n") == b"hello\n"
        except (ssl.SSLError, ConnectionError):
            # With TLS 1.2 a client is refused in the handshake, with 1.3 after it.
            return False

    async with echo(files_of(server, trusted)) as port, asyncio.timeout(20):
        assert [await answers(port, pair) for pair in shown] == [True, False, False, False]
        trust(trusted, other)
        assert [await answers(port, pair) for pair in shown] == [False, True, False, False]


def test_an_old_version_of_tls_is_not_spoken(authority: Authority) -> None:
    files = files_of(authority.issue("server"))
    for context in (http_context(files), files.current().context):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


# Who a service is.


def test_a_service_without_certificates_takes_all() -> None:
    identity = InternalIdentity(InternalSecuritySettings())
    assert identity.peer("worker") is None
    assert identity.gate("gateway") is None
    assert identity.credentials() is None


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_part_of_a_services_files_is_an_error(authority: Authority, missing: int) -> None:
    pair = authority.issue("worker")
    files = [str(pair.certificate), str(pair.key), str(authority.certificate)]
    files[missing] = ""
    with pytest.raises(CertificateError, match="go together"):
        InternalIdentity(InternalSecuritySettings(*files))


def test_the_names_of_services_have_their_domain(authority: Authority) -> None:
    pair = authority.issue("worker")
    told = InternalSecuritySettings(str(pair.certificate), str(pair.key), str(authority.certificate), "example.org")
    peer = InternalIdentity(told).peer("worker")
    assert peer is not None
    assert peer.name == "worker.example.org"


@pytest.mark.parametrize(
    ("address", "certified", "told"),
    [("127.0.0.1:1", False, False), ("0.0.0.0:1", False, True), ("0.0.0.0:1", True, False), ("unix:/w", False, False)],
)
def test_a_port_that_anybody_may_command_is_told(
    authority: Authority, caplog: pytest.LogCaptureFixture, address: str, certified: bool, told: bool
) -> None:
    pair = authority.issue("worker")
    files = (str(pair.certificate), str(pair.key), str(authority.certificate)) if certified else ("", "", "")
    with caplog.at_level(logging.WARNING):
        InternalIdentity(InternalSecuritySettings(*files)).warn_if_exposed(address)
    assert bool(caplog.records) is told
