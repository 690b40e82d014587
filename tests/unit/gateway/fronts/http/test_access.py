"""The HTTP side of access, on a real listener: keys, certificates, and what a connection may cost."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from starlette.staticfiles import StaticFiles

from blockyard.security.authentication import CALLER, CertificateGate, KeyGate
from blockyard.security.keys import Key, KeyRing, KeyRole, add_key, digest
from blockyard.security.tls import CertificateFiles
from gateway.access import Access
from gateway.fronts.http import access as http_access
from gateway.fronts.http.access import MAX_HEADER_BYTES, BoundedProtocol, with_authentication
from gateway.fronts.http.server import HttpFront
from tests.kit.authority import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
def keyed(tmp_path: Path) -> KeyGate:
    path = tmp_path / "keys.yaml"
    add_key(path, Key(name="user", sha256=digest("u"), tenant="acme"))
    add_key(path, Key(name="one", sha256=digest("1"), tenant="acme", max_calls=1))
    add_key(path, Key(name="monitor", sha256=digest("m"), tenant="ops", role=KeyRole.MONITOR))
    return KeyGate(KeyRing(str(path)), KeyRole.USER)


class App:
    """An application that tells who calls it; `/slow` waits for `go_on`."""

    def __init__(self, folder: Path) -> None:
        self.api = FastAPI()
        self.is_in, self.go_on = asyncio.Event(), asyncio.Event()
        for path in ("/v1/who", "/metrics", "/health", "/health/live", "/"):
            self.api.add_api_route(path, self.who, methods=["GET", "POST"])
        self.api.add_api_route("/slow", self.slow)
        (folder / "files").mkdir()
        (folder / "files" / "a.txt").write_text("a")
        self.api.mount("/files", StaticFiles(directory=folder / "files"))

    async def who(self, request: Request) -> Response:
        body = await request.body()
        return Response(f"{CALLER.get().name}|{CALLER.get().tenant}|{len(body)}")

    async def slow(self) -> Response:
        self.is_in.set()
        await self.go_on.wait()
        return Response("done")


@asynccontextmanager
async def serving(app: App, access: Access) -> AsyncIterator[int]:
    front = HttpFront(app.api, access)
    port = front.bind("127.0.0.1", 0)
    front.start()
    try:
        yield port
    finally:
        await front.stop()


def client(port: int, **options: Any) -> httpx.AsyncClient:
    scheme = "https" if "verify" in options else "http"
    return httpx.AsyncClient(base_url=f"{scheme}://127.0.0.1:{port}", timeout=10, **options)


@pytest.mark.parametrize(
    "header", [{"Authorization": "Bearer u"}, {"API-Key": "u"}, {"X-API-Key": "u"}, {"authorization": "bearer u"}]
)
async def test_a_key_opens_and_tells_whose_the_call_is(tmp_path: Path, keyed: KeyGate, header: dict[str, str]) -> None:
    async with serving(App(tmp_path), Access(api=keyed)) as port, client(port) as http:
        assert (await http.get("/v1/who", headers=header)).text == "user|acme|0"


async def test_without_a_key_everything_is_closed_but_what_is_open(tmp_path: Path, keyed: KeyGate) -> None:
    async with serving(App(tmp_path), Access(api=keyed)) as port, client(port) as http:
        for path in ("/v1/who", "/metrics", "/files/a.txt", "/nowhere", "/openapi.json", "/docs"):
            answer = await http.get(path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "UNAUTHENTICATED"
        for path in ("/", "/health", "/health/live"):
            assert (await http.get(path)).text == "|None|0", path
        assert (await http.get("/metrics", headers={"api-key": "m"})).status_code == 200
        assert (await http.get("/v1/who", headers={"api-key": "m"})).status_code == 403


async def test_a_refusal_has_the_form_of_the_api_that_was_called(tmp_path: Path, keyed: KeyGate) -> None:
    async with serving(App(tmp_path), Access(api=keyed)) as port, client(port) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = (await http.post(path, headers={"x-api-key": "x"})).json()
            assert (body["type"], body["error"]["type"]) == ("error", "authentication_error"), path
        for path in ("/v2", "/v2/models/demo/infer"):
            refusal = await http.post(path, headers={"x-api-key": "x"})
            assert (refusal.status_code, refusal.json()["error"][:17]) == (401, "UNAUTHENTICATED: "), path
        assert (await http.post("/v2/rerank")).json()["error"]["code"] == "UNAUTHENTICATED"
        versioned = {"anthropic-version": "2023-06-01"}
        assert (await http.get("/v1/models", headers=versioned)).json()["type"] == "error"
        assert "type" not in (await http.get("/v1/models")).json()


@pytest.mark.parametrize("target", ["/health/../v1/who", "/health/%2e%2e/v1/who", "/%2Fv1/who", "/health//../v1/who"])
async def test_no_detour_through_what_is_open_leads_in(tmp_path: Path, keyed: KeyGate, target: str) -> None:
    async with serving(App(tmp_path), Access(api=keyed)) as port:
        answer = await exchange(port, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.split()[1] in (b"401", b"404"), answer


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Sends bytes, and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(("kind", "path", "is_called"), [("lifespan", "", True), ("websocket", "/v1/who", False)])
async def test_what_is_no_request_is_closed_too(keyed: KeyGate, kind: str, path: str, is_called: bool) -> None:
    called: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["type"])

    async def nothing(*_: Any) -> Any:
        return {"type": f"{kind}.connect"}

    await with_authentication(app, keyed)({"type": kind, "path": path, "headers": []}, nothing, nothing)
    assert called == ([kind] if is_called else [])


async def test_a_key_has_so_many_calls_at_once(tmp_path: Path, keyed: KeyGate) -> None:
    app = App(tmp_path)
    async with serving(app, Access(api=keyed)) as port, client(port, headers={"api-key": "1"}) as http:
        slow = asyncio.create_task(http.get("/slow"))
        await app.is_in.wait()
        refused = await http.get("/v1/who")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "TENANT_QUOTA"
        assert refused.headers["retry-after"] == "1"
        app.go_on.set()
        assert (await slow).text == "done"
        assert (await http.get("/v1/who")).status_code == 200


async def test_calls_on_one_connection_are_each_their_own(tmp_path: Path, keyed: KeyGate) -> None:
    limits = httpx.Limits(max_connections=1)
    async with serving(App(tmp_path), Access(api=keyed)) as port, client(port, limits=limits) as http:
        for key, told in (("u", "user|acme|0"), ("1", "one|acme|0"), ("u", "user|acme|0")):
            assert (await http.get("/v1/who", headers={"api-key": key})).text == told
        # A caller of before is not the caller of now.
        assert (await http.get("/")).text == "|None|0"


async def test_a_certificate_tells_whose_the_call_is(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    server = authority.issue("server")
    files = CertificateFiles(str(server.certificate), str(server.key), str(authority.certificate))

    def shown(signer: Authority, name: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(authority.certificate))
        pair = signer.issue(name)
        context.load_cert_chain(pair.certificate, pair.key)
        return context

    async with serving(App(tmp_path), Access(files, CertificateGate())) as port:
        async with client(port, verify=shown(authority, "acme")) as http:
            assert (await http.get("/v1/who")).text == "acme|acme|0"
        async with client(port, verify=shown(authority, "no tenant")) as http:
            assert (await http.get("/v1/who")).status_code == 403
        async with client(port, verify=shown(other, "acme")) as http:
            with pytest.raises(httpx.TransportError):
                await http.get("/v1/who")


# What a connection may cost.


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "request_seconds", 0.2)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /v1/who HT",
        b"GET /v1/who HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/who HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n123",
    ],
)
@pytest.mark.usefixtures("hurried")
async def test_a_request_that_does_not_come_is_not_waited_for(tmp_path: Path, said: bytes) -> None:
    async with serving(App(tmp_path), Access()) as port:
        assert await exchange(port, said) == b""


@pytest.mark.usefixtures("hurried")
async def test_a_drop_now_and_then_does_not_keep_a_connection(tmp_path: Path) -> None:
    async with serving(App(tmp_path), Access()) as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(b"x: y\r\n")
            await asyncio.wait({closed}, timeout=0.02)
        # A header that arrives after the close resets the connection.
        with contextlib.suppress(ConnectionError):
            assert await closed == b""
        writer.close()


@pytest.mark.usefixtures("hurried")
async def test_an_answer_may_take_its_time(tmp_path: Path) -> None:
    app = App(tmp_path)
    async with serving(app, Access()) as port, client(port) as http:
        slow = asyncio.create_task(http.get("/slow"))
        await app.is_in.wait()
        # Longer than a request may take to come.
        await asyncio.wait({slow}, timeout=2 * BoundedProtocol.request_seconds)
        app.go_on.set()
        assert (await slow).text == "done"
        # And the next request has a time of its own.
        assert (await http.get("/v1/who")).status_code == 200


async def test_a_connection_too_many_is_told_when_to_try_again(tmp_path: Path) -> None:
    async with serving(App(tmp_path), Access(max_connections=2)) as port, asyncio.timeout(10):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        request = b"GET /v1/who HTTP/1.1\r\nHost: x\r\n\r\n"
        for reader, writer in held:
            writer.write(request)
            assert (await reader.readline()).split()[1] == b"200"
        async with client(port) as http:
            refused = await http.post("/v1/who", content=b"x" * 1000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "QUEUE_FULL")
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        reader, writer = held.pop()
        writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        await reader.read()
        writer.close()
        # The server has closed that one itself: there is room again.
        held.append(await asyncio.open_connection("127.0.0.1", port))
        held[-1][1].write(request)
        assert (await held[-1][0].readline()).split()[1] == b"200"
        for _, writer in held:
            writer.close()


async def test_connections_far_too_many_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_access, "MAX_REFUSED_CONNECTIONS", 1)
    async with serving(App(tmp_path), Access(max_connections=1)) as port, asyncio.timeout(10):
        request = b"GET /v1/who HTTP/1.1\r\nHost: x\r\n\r\n"
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert await exchange(port, request) == b""
        held[1][1].write(request)
        assert (await held[1][0].readline()).split()[1] == b"429"
        for _, writer in held:
            writer.close()


async def test_nonsense_is_answered_and_fills_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    with caplog.at_level("DEBUG"):
        async with serving(App(tmp_path), Access()) as port:
            for said in (
                b"\x16\x03\x01 no TLS here",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"nonsense\r\n\r\n",
                upgrade,
            ):
                assert (await exchange(port, said)).startswith(b"HTTP/1.1 ")
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


async def test_headers_have_a_limit(tmp_path: Path) -> None:
    """Of headers that do not come in one piece: those that do are as long as what is read at once."""
    head = b"GET /v1/who HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx: "
    async with serving(App(tmp_path), Access()) as port:
        assert (await exchange(port, head + b"y" * (MAX_HEADER_BYTES // 2) + b"\r\n\r\n")).split()[1] == b"200"
        assert (await exchange(port, head + b"y" * 2**20)).split()[1:2] in ([b"400"], [])


async def test_long_headers_in_one_piece_are_refused_and_told_why(tmp_path: Path) -> None:
    async with serving(App(tmp_path), Access()) as port, client(port) as http:
        allowed = await http.get("/v1/who", headers={"x": "y" * (MAX_HEADER_BYTES - 1024)})
        assert allowed.status_code == 200
        for asked in ({"headers": {"x": "y" * MAX_HEADER_BYTES}}, {"params": {"x": "y" * MAX_HEADER_BYTES}}):
            refused = await http.get("/v1/who", **asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (431, "headers_too_large")
            assert str(MAX_HEADER_BYTES) in refused.json()["error"]["message"]
