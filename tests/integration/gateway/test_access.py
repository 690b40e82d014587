"""The whole gateway behind keys and certificates: every method and every route that there is, and whose a call is."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.client.access import ClientAccess, ClientTls
from blockyard.client.asynchronous import AsyncClient
from blockyard.client.retry import RetryPolicy
from blockyard.configuration import ModelSettings, PublicSettings, SecuritySettings
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.security.authentication import MONITORING, Authenticator
from blockyard.security.keys import Key, KeyFileError, KeyRole, add_key, digest
from blockyard.security.tls import CertificateError
from blockyard.settings import SettingsError
from gateway.access import make_access
from gateway.config import GatewayConfiguration, ServiceSettings
from gateway.fronts.http.server import HttpFront
from gateway.server import Parts, Server
from tests.kit.authority import Authority
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator
    from pathlib import Path

    from fastapi import FastAPI

    from gateway.access import Access

USER, PROXY, ADMIN, MONITOR = "user-key", "proxy-key", "admin-key", "monitor-key"
ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        yield scheduler


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    for name, secret, tenant, role in (
        ("user", USER, "acme", KeyRole.USER),
        ("proxy", PROXY, "*", KeyRole.USER),
        ("admin", ADMIN, "ops", KeyRole.ADMIN),
        ("monitor", MONITOR, "ops", KeyRole.MONITOR),
    ):
        add_key(path, Key(name=name, sha256=digest(secret), tenant=tenant, role=role))
    return str(path)


def configuration(scheduler: FakeScheduler, security: SecuritySettings, **service: Any) -> GatewayConfiguration:
    return GatewayConfiguration(
        model=ModelSettings(model=str(DEMO_MODEL)),
        public=PublicSettings(grpc_port=0, http_port=0, admin_port=0),
        security=security,
        service=ServiceSettings(scheduler_address=scheduler.address, gateway_health_port=0, **service),
    )


@asynccontextmanager
async def running(configured: GatewayConfiguration, **options: Any) -> AsyncIterator[Server]:
    gateway = Server(configured, **options)
    try:
        await gateway.start()
        async with asyncio.timeout(10):
            await gateway.generation.model_of("").link.wait_until(gateway.generation.is_ready)
        yield gateway
    finally:
        await gateway.stop()


def channel_to(port: int, tls: ClientTls | bool = False) -> grpc.aio.Channel:
    return ClientAccess(tls=tls).make_aio_channel(f"127.0.0.1:{port}")


def metadata(key: str | None, tenant: str | None = None) -> tuple[tuple[str, str], ...]:
    told = (("authorization", f"Bearer {key}" if key else None), ("x-blockyard-tenant", tenant))
    return tuple((name, value) for name, value in told if value)


async def methods_of(channel: grpc.aio.Channel, key: str) -> list[str]:
    """All methods that a listener says it has."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([question]), metadata=metadata(key))
    services = [service.name for service in (await call.read()).list_services_response.service]
    call.cancel()
    pool = descriptor_pool.Default()
    return [f"/{name}/{method.name}" for name in services for method in pool.FindServiceByName(name).methods]


async def reason_of(channel: grpc.aio.Channel, method: str, key: str | None) -> Reason | None:
    """How a call ends that says nothing: for lack of leave, or of anything else."""
    call: Any = channel.stream_stream(method)(iter([b""]), metadata=metadata(key), timeout=10)
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    finally:
        call.cancel()
    return None


@pytest.mark.parametrize(("port", "good", "other"), [("grpc_port", USER, ADMIN), ("admin_port", ADMIN, USER)])
async def test_every_method_but_health_needs_a_key_of_its_role(
    scheduler: FakeScheduler, keys_file: str, port: str, good: str, other: str
) -> None:
    configured = configuration(scheduler, SecuritySettings(api_keys_file=keys_file))
    async with running(configured) as gateway, channel_to(getattr(gateway, port)) as channel:
        methods = await methods_of(channel, good)
        closed = [method for method in methods if not method.startswith("/grpc.health.")]
        assert len(methods) > len(closed) > 1
        for method in closed:
            assert await reason_of(channel, method, None) is Reason.UNAUTHENTICATED, method
            assert await reason_of(channel, method, "no-key") is Reason.UNAUTHENTICATED, method
            assert await reason_of(channel, method, other) is Reason.PERMISSION_DENIED, method
            assert await reason_of(channel, method, MONITOR) is Reason.PERMISSION_DENIED, method
        for method in set(methods) - set(closed):
            reason = await reason_of(channel, method, None)
            assert reason not in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED), method


def flatten(routes: Iterable[Any]) -> Iterator[Any]:
    """Finds all routes: FastAPI keeps a router that was included as one."""
    for route in routes:
        included = getattr(route, "original_router", None)
        yield from (route,) if included is None else flatten(included.routes)


async def test_every_route_but_what_is_open_needs_a_key(scheduler: FakeScheduler, keys_file: str) -> None:
    apps: list[FastAPI] = []

    class Seen(HttpFront):
        def __init__(self, app: Any, *rest: Any, **options: Any) -> None:
            apps.append(app)
            super().__init__(app, *rest, **options)

    settings = configuration(scheduler, SecuritySettings(api_keys_file=keys_file))
    async with (
        running(settings, parts=Parts(make_front=Seen)) as running_gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running_gateway.http_port}", timeout=10) as http,
    ):
        # The other one is for operators, at a port of its own.
        routes = max((list(flatten(app.routes)) for app in apps), key=len)
        assert len(routes) > 10
        opened: set[str] = set()
        for route in routes:
            path = re.sub(r"\{[^}]*\}", "x", route.path) or "/"
            for method in getattr(route, "methods", None) or ("GET",):
                answer = await http.request(method, path)
                if Authenticator.is_open(path):
                    opened.add(route.path)
                    assert answer.status_code not in (401, 403), route.path
                else:
                    assert answer.status_code == 401, (method, route.path)
                    refused = await http.request(method, path, headers={"authorization": f"Bearer {ADMIN}"})
                    assert refused.status_code == (200 if path in MONITORING else 403), (method, route.path)
        # A change here is a change of what a stranger can see.
        health = {"/health", "/health/live", "/health/ready", "/health/startup", "/v2/health/live", "/v2/health/ready"}
        assert opened == {"/", "/page/{name}", *health}


async def test_all_is_open_without_keys(scheduler: FakeScheduler) -> None:
    async with running(configuration(scheduler, SecuritySettings())) as gateway:
        for port in (gateway.grpc_port, gateway.admin_port):
            async with channel_to(port) as channel:
                for method in await methods_of(channel, ""):
                    reason = await reason_of(channel, method, None)
                    assert reason not in (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED), method


async def test_a_call_is_its_keys_tenants_on_both_fronts(scheduler: FakeScheduler, keys_file: str) -> None:
    body = {"model": "demo", "prompt": "x = 1\n", "max_tokens": 2}
    configured = configuration(scheduler, SecuritySettings(api_keys_file=keys_file))
    async with (
        running(configured) as gateway,
        channel_to(gateway.grpc_port) as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=10) as http,
    ):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for key, tenant, expected in (
            (USER, None, "acme"),
            (USER, "acme", "acme"),
            (USER, "other", None),
            (PROXY, "other", "other"),
            (PROXY, None, ""),
        ):
            scheduler.added.clear()
            request = inference_pb2.GenerateRequest(spec=spec(max_tokens=2))
            headers = dict(metadata(key, tenant))
            if expected is None:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.Generate(request, metadata=metadata(key, tenant))
                assert from_rpc_error(raised.value).reason is Reason.PERMISSION_DENIED
                answer = await http.post("/v1/completions", json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "PERMISSION_DENIED")
                assert scheduler.added == []
                continue
            await stub.Generate(request, metadata=metadata(key, tenant))
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            assert [add.tenant for add in scheduler.added] == [expected, expected]


async def test_a_tenant_finds_its_own_requests_only(scheduler: FakeScheduler, keys_file: str) -> None:
    configured = configuration(scheduler, SecuritySettings(api_keys_file=keys_file))
    async with running(configured) as gateway:
        target = f"127.0.0.1:{gateway.grpc_port}"
        async with AsyncClient(target, api_key=USER) as mine, AsyncClient(target, api_key=PROXY, retry=ONCE) as others:
            first = await mine.generate("x = 1\n", max_tokens=3, request_id="r")
            assert (await mine.resume("r").result()).choices[0].text == first.choices[0].text
            with pytest.raises(BlockyardError) as raised:
                await others.resume("r").result()
            assert raised.value.reason is Reason.REQUEST_EXPIRED


async def test_certificates_are_tenants_and_administrators(scheduler: FakeScheduler, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    server = authority.issue("server")
    security = SecuritySettings(
        tls_certificate=str(server.certificate),
        tls_key=str(server.key),
        tls_client_authority=str(authority.certificate),
        tls_admin_names="ops, root",
    )
    acme, ops = (authority.client(authority.issue(name)) for name in ("acme", "ops"))
    async with running(configuration(scheduler, security)) as gateway:
        async with channel_to(gateway.grpc_port, acme) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            await stub.Generate(inference_pb2.GenerateRequest(spec=spec(max_tokens=2)))
            assert scheduler.added[-1].tenant == "acme"
        for tls, reason in ((acme, Reason.PERMISSION_DENIED), (ops, None)):
            async with channel_to(gateway.admin_port, tls) as channel:
                assert await reason_of(channel, "/blockyard.admin.v1.AdminService/GetStatus", None) is reason
        context = ssl.create_default_context(cafile=acme.authority)
        context.load_cert_chain(acme.certificate, acme.key)
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{gateway.http_port}", verify=context) as http:
            body = {"model": "demo", "prompt": "x = 1\n", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert scheduler.added[-1].tenant == "acme"


async def test_the_health_port_is_plain_whatever_the_others_ask_for(
    scheduler: FakeScheduler, keys_file: str, tmp_path: Path
) -> None:
    pair = Authority(tmp_path / "pki").issue("server")
    security = SecuritySettings(tls_certificate=str(pair.certificate), tls_key=str(pair.key), api_keys_file=keys_file)
    async with (
        running(configuration(scheduler, security)) as gateway,
        channel_to(gateway.monitoring.health_port) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_local_socket_asks_for_nothing(scheduler: FakeScheduler, keys_file: str, tmp_path: Path) -> None:
    local = f"unix:{tmp_path}/local"
    configured = configuration(scheduler, SecuritySettings(api_keys_file=keys_file), gateway_local_address=local)
    async with running(configured), ClientAccess().make_aio_channel(local) as channel:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        assert (await admin.GetStatus(admin_pb2.GetStatusRequest())).gateway.gateway_id
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Generate(inference_pb2.GenerateRequest(spec=spec(max_tokens=2)))).choices


async def test_an_unprotected_address_is_told(
    scheduler: FakeScheduler, keys_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    for host, security, missing in (
        ("127.0.0.1", SecuritySettings(), None),
        ("0.0.0.0", SecuritySettings(), "--api-keys-file --tls-certificate"),
        ("0.0.0.0", SecuritySettings(api_keys_file=keys_file), "--tls-certificate"),
    ):
        configured = configuration(scheduler, security)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            async with running(replace(configured, public=replace(configured.public, host=host))):
                pass
        told = [record.__dict__["fields"]["missing"] for record in caplog.records if "protected" in record.message]
        assert told == ([missing] if missing else [])


# Settings.


def access(**settings: Any) -> Access:
    return make_access(SecuritySettings(**settings))


def test_nothing_is_asked_for_by_itself() -> None:
    told = access()
    assert (told.api, told.admin, told.files, told.credentials()) == (None, None, None, None)


@pytest.mark.parametrize(
    "settings",
    [{"tls_certificate": "a"}, {"tls_key": "a"}, {"tls_client_authority": "a"}],
    ids=lambda told: next(iter(told)),
)
def test_what_goes_together_is_asked_for_together(settings: dict[str, str]) -> None:
    with pytest.raises(CertificateError, match="--tls-certificate and --tls-key"):
        access(**settings)


def test_files_that_are_not_there_end_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="none"):
        access(api_keys_file=str(tmp_path / "none"))
    with pytest.raises(CertificateError, match="none"):
        access(tls_certificate=str(tmp_path / "none"), tls_key=str(tmp_path / "none"))


async def test_an_open_host_opens_no_admin_port(scheduler: FakeScheduler) -> None:
    open_host = replace(configuration(scheduler, SecuritySettings()).public, host="0.0.0.0")
    configured = replace(configuration(scheduler, SecuritySettings()), public=open_host)
    # An address of this machine that is not the one that the admin API listens on.
    other = "127.0.0.2"
    async with running(configured) as gateway:
        socket.create_connection((other, gateway.grpc_port), timeout=10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, gateway.admin_port), timeout=10)


async def test_an_admin_port_that_others_reach_needs_keys(scheduler: FakeScheduler, keys_file: str) -> None:
    for security, is_refused in ((SecuritySettings(), True), (SecuritySettings(api_keys_file=keys_file), False)):
        configured = configuration(scheduler, security)
        configured = replace(configured, public=replace(configured.public, admin_host="0.0.0.0"))
        with pytest.raises(SettingsError, match=r"--admin-host 0\.0\.0\.0") if is_refused else nullcontext():
            await Server(configured).stop()
