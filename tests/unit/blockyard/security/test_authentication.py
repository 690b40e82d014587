"""Who is let in: the gates by themselves, and the authenticator before every method of a real server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, ExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.security import authentication
from blockyard.security.authentication import (
    CALLER,
    MONITORING,
    Authenticator,
    Caller,
    CertificateGate,
    Credentials,
    KeyGate,
    ServiceGate,
    find_key,
)
from blockyard.security.exposure import is_loopback
from blockyard.security.keys import Key, KeyRing, KeyRole, add_key, digest
from blockyard.service import servers as rpc
from blockyard.service.health import add_health

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from blockyard.security.authentication import Gate

METHOD = "/blockyard.inference.v1.InferenceService/Generate"
EXPIRES = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    path = tmp_path / "keys.yaml"
    for key in (
        Key(name="user", sha256=digest("u"), tenant="acme"),
        Key(name="proxy", sha256=digest("p"), tenant="*"),
        Key(name="admin", sha256=digest("a"), tenant="ops", role=KeyRole.ADMIN),
        Key(name="monitor", sha256=digest("m"), tenant="ops", role=KeyRole.MONITOR),
        Key(name="late", sha256=digest("l"), tenant="acme", expires=EXPIRES),
        Key(name="two", sha256=digest("2"), tenant="acme", max_calls=2),
    ):
        add_key(path, key)
    return KeyRing(str(path))


def user_gate(ring: KeyRing, now: float = 0.0) -> KeyGate:
    return KeyGate(ring, KeyRole.USER, lambda: now)


def refusal(gate: Gate, credentials: Credentials, path: str = METHOD) -> BlockyardError:
    with pytest.raises(BlockyardError) as raised, gate.admit(credentials, path):
        pass
    return raised.value


def admitted(gate: Gate, credentials: Credentials, path: str = METHOD) -> Caller:
    with gate.admit(credentials, path) as caller:
        return caller


# Gates.


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"authorization": "Bearer abc"}, "abc"),
        ({"authorization": "bearer  abc "}, "abc"),
        ({"authorization": "Basic abc"}, ""),
        ({"authorization": "abc"}, ""),
        ({"authorization": "Bearer "}, ""),
        ({"api-key": "abc"}, "abc"),
        ({"api-key": "abc", "authorization": "Bearer def"}, "def"),
    ],
)
def test_where_a_key_is(headers: dict[str, str], key: str) -> None:
    assert find_key(headers) == key


def test_a_key_tells_the_tenant(ring: KeyRing) -> None:
    assert admitted(user_gate(ring), Credentials("u")) == Caller("user", "acme")
    assert admitted(user_gate(ring), Credentials("p")) == Caller("proxy", None)


@pytest.mark.parametrize(("key", "told"), [("", "a key is needed"), ("x", "not known"), (digest("u"), "not known")])
def test_without_a_key_nobody_is_let_in(ring: KeyRing, key: str, told: str) -> None:
    error = refusal(user_gate(ring), Credentials(key))
    assert error.reason is Reason.UNAUTHENTICATED
    assert told in error.message
    assert key not in error.message or not key


def test_a_certificate_is_no_key(ring: KeyRing) -> None:
    credentials = Credentials("", "acme", ("gateway.blockyard",))
    assert refusal(user_gate(ring), credentials).reason is Reason.UNAUTHENTICATED


def test_a_key_ends_when_it_expires(ring: KeyRing) -> None:
    assert admitted(user_gate(ring, EXPIRES.timestamp() - 1), Credentials("l")).name == "late"
    error = refusal(user_gate(ring, EXPIRES.timestamp()), Credentials("l"))
    assert (error.reason, error.message) == (Reason.UNAUTHENTICATED, "the key late has expired")


@pytest.mark.parametrize(("role", "good"), [(KeyRole.USER, "u"), (KeyRole.ADMIN, "a")])
def test_a_key_opens_what_its_role_says_and_every_one_metrics(ring: KeyRing, role: KeyRole, good: str) -> None:
    gate = KeyGate(ring, role)
    for key in "uam":
        if key == good:
            assert admitted(gate, Credentials(key))
        else:
            assert refusal(gate, Credentials(key)).reason is Reason.PERMISSION_DENIED
        for path in MONITORING:
            assert admitted(gate, Credentials(key), path)
    assert refusal(gate, Credentials("x"), MONITORING[0]).reason is Reason.UNAUTHENTICATED


def test_a_key_has_so_many_calls_at_once(ring: KeyRing) -> None:
    gate, credentials = user_gate(ring), Credentials("2")
    with ExitStack() as first:
        first.enter_context(gate.admit(credentials, METHOD))
        with gate.admit(credentials, METHOD):
            error = refusal(gate, credentials)
            assert error.reason is Reason.TENANT_QUOTA
            assert error.retry_after_seconds == 1.0
            assert admitted(gate, Credentials("u"))
        with gate.admit(credentials, METHOD), pytest.raises(RuntimeError, match="in the midst"):
            first.close()
            with gate.admit(credentials, METHOD):
                raise RuntimeError("in the midst")
        assert admitted(gate, credentials)


def test_watching_is_no_call_that_counts(ring: KeyRing) -> None:
    gate, credentials = user_gate(ring), Credentials("2")
    with gate.admit(credentials, METHOD), gate.admit(credentials, METHOD):
        assert admitted(gate, credentials, MONITORING[0])
    with gate.admit(credentials, MONITORING[0]), gate.admit(credentials, METHOD), gate.admit(credentials, METHOD):
        assert refusal(gate, credentials).reason is Reason.TENANT_QUOTA


def test_a_certificate_tells_the_tenant() -> None:
    assert admitted(CertificateGate(), Credentials(common_name="acme")) == Caller("acme", "acme")
    assert refusal(CertificateGate(), Credentials("key")).reason is Reason.UNAUTHENTICATED


@pytest.mark.parametrize("name", ["a/b", "a b", "x" * 65, "*", "a\n"])
def test_a_common_name_that_is_no_tenants_is_refused(name: str) -> None:
    assert refusal(CertificateGate(), Credentials(common_name=name)).reason is Reason.PERMISSION_DENIED


def test_only_named_certificates_are_administrators() -> None:
    gate = CertificateGate(frozenset({"ops"}))
    assert admitted(gate, Credentials(common_name="ops")).name == "ops"
    assert refusal(gate, Credentials(common_name="acme")).reason is Reason.PERMISSION_DENIED
    assert refusal(CertificateGate(frozenset()), Credentials(common_name="ops")).reason is Reason.PERMISSION_DENIED


def test_a_service_lets_in_one_service() -> None:
    gate = ServiceGate("gateway.blockyard")
    assert admitted(gate, Credentials(names=("x", "gateway.blockyard")))
    for names in ((), ("worker.blockyard",), ("gateway.blockyard.example.org",)):
        # The common name of a certificate counts for nothing between services.
        credentials = Credentials("key", "gateway.blockyard", names)
        assert refusal(gate, credentials).reason is Reason.PERMISSION_DENIED


# The authenticator.


def test_what_is_open_is_what_is_listed() -> None:
    for path in (
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/health",
        "/health/live",
        "/v2/health/ready",
        "/",
        "/page/a.js",
    ):
        assert Authenticator.is_open(path), path
    for path in (METHOD, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/v1/models", "/metrics"):
        assert not Authenticator.is_open(path), path
    for path in (
        "",
        "//",
        "/healthy",
        "/page",
        "/HEALTH",
        "/v2",
        "/v2/models/demo/ready",
        "/status",
        "/docs",
        "/openapi.json",
        "/version",
    ):
        assert not Authenticator.is_open(path), path


async def test_refusals_are_told_together(ring: KeyRing, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    keeper = Authenticator(user_gate(ring))

    def knock() -> None:
        with pytest.raises(BlockyardError), keeper.enter(Credentials("secret-guess"), METHOD):
            pass

    with caplog.at_level(logging.DEBUG):
        for _ in range(50):
            knock()
        assert len(caplog.records) == 1
        monkeypatch.setattr(authentication, "REFUSALS_SECONDS", 0.0)
        knock()
    assert caplog.records[-1].__dict__["fields"]["num_calls"] == 50
    assert "secret-guess" not in caplog.text + str([record.__dict__ for record in caplog.records])


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every method of every kind with the name of its caller."""

    def service(self, handler_call_details: Any) -> Any:
        kind = handler_call_details.method.rpartition("/")[2]
        if kind == "Missing":
            return None
        return {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.one),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(self.several),
            "UnaryWritten": grpc.unary_stream_rpc_method_handler(self.written),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(self.one),
            "StreamStream": grpc.stream_stream_rpc_method_handler(self.several),
        }[kind]

    async def one(self, request: Any, context: Any) -> bytes:
        await asyncio.sleep(0)
        return CALLER.get().name.encode()

    async def several(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        for _ in range(2):
            await asyncio.sleep(0)
            yield CALLER.get().name.encode()

    async def written(self, request: Any, context: Any) -> None:
        await context.write(CALLER.get().name.encode())


KINDS = ("UnaryUnary", "UnaryStream", "UnaryWritten", "StreamUnary", "StreamStream")


@pytest.fixture
async def guarded(ring: KeyRing) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.make_server(1000, ["any.Service"], gate=user_gate(ring))
    server.add_generic_rpc_handlers((Handlers(),))
    add_health(server, lambda: True, lambda: True)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def call(channel: grpc.aio.Channel, method: str, *metadata: tuple[str, str]) -> list[bytes]:
    """Calls any method: on the wire all kinds are streams.

    A request that is not streamed goes out with its metadata. A write of its own may meet a call that was refused
    already, for which grpcio then tells an internal error of the client (https://github.com/grpc/grpc/issues/36066).
    """
    stream: Any = channel.unary_stream(method)(b"", metadata=metadata, timeout=5)
    return [message async for message in stream]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_method_is_guarded_and_knows_its_caller(guarded: Any, kind: str) -> None:
    method = f"/any.Service/{kind}"
    for metadata in ((("authorization", "Bearer u"),), (("api-key", "u"),)):
        assert set(await call(guarded, method, *metadata)) == {b"user"}
    assert set(await call(guarded, method, ("authorization", "Bearer p"))) == {b"proxy"}
    for metadata, reason in (
        ((), Reason.UNAUTHENTICATED),
        ((("authorization", "Bearer x"),), Reason.UNAUTHENTICATED),
        ((("authorization", "Bearer a"),), Reason.PERMISSION_DENIED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(guarded, method, *metadata)
        error = from_rpc_error(raised.value)
        assert error.reason is reason
        assert raised.value.code() is error.code


async def test_calls_of_a_key_are_counted_to_their_end(guarded: Any) -> None:
    for _ in range(3):
        for kind in KINDS:
            assert await call(guarded, f"/any.Service/{kind}", ("api-key", "2"))


async def test_health_needs_no_key_and_reflection_does(guarded: Any) -> None:
    assert await call(guarded, "/grpc.health.v1.Health/Check")
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(guarded, reflection)
    assert from_rpc_error(raised.value).reason is Reason.UNAUTHENTICATED
    assert await call(guarded, reflection, ("api-key", "u"))


async def test_what_nobody_answers_is_told_so(guarded: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(guarded, "/any.Service/Missing")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_callers_at_once_do_not_mix(guarded: Any) -> None:
    keys = ["u", "p"] * 20
    answers = await asyncio.gather(*(call(guarded, "/any.Service/StreamStream", ("api-key", key)) for key in keys))
    assert answers == [[{"u": b"user", "p": b"proxy"}[key]] * 2 for key in keys]


# Limits of a server.


async def is_greeted(stack: AsyncExitStack, port: int) -> bool:
    """Whether a server takes one more connection, which stays open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    try:
        async with asyncio.timeout(5):
            return bool(await reader.read(9))
    except ConnectionError:
        return False


async def test_a_server_has_so_many_connections_at_once() -> None:
    server = rpc.make_server(1000, [], max_connections=2)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with AsyncExitStack() as stack:
        assert [await is_greeted(stack, port) for _ in range(4)] == [True, True, False, False]
    await server.stop(0)


async def test_who_connects_and_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_SECONDS", 1)
    server = rpc.make_server(1000, [])
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(20):
        # The server greets first, then waits for the client to do so.
        while await reader.read(1000):
            pass
    writer.close()
    await server.stop(0)


async def test_metadata_has_a_limit(guarded: Any) -> None:
    fits, too_long = ("x-long", "x" * 8000), ("x-long", "x" * (3 * rpc.MAX_METADATA_BYTES))
    assert await call(guarded, "/any.Service/UnaryUnary", ("api-key", "u"), fits)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(guarded, "/any.Service/UnaryUnary", ("api-key", "u"), too_long)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:50060", True),
        ("127.8.9.1:0", True),
        ("::1", True),
        ("[::1]:50060", True),
        ("localhost", True),
        ("localhost:50060", True),
        ("unix:/run/worker", True),
        ("0.0.0.0", False),
        ("0.0.0.0:50060", False),
        ("::", False),
        ("[::]:50060", False),
        ("10.0.0.7:50070", False),
        ("gateway.example.org", False),
        ("gateway.example.org:50051", False),
    ],
)
def test_what_only_this_machine_reaches(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
