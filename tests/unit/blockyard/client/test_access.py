"""Clients and commands at a server that asks for keys and TLS, and the commands that make keys."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient, Client, ClientTls
from blockyard.client.retry import RetryPolicy
from blockyard.errors import BlockyardError, Reason
from blockyard.security.authentication import KeyGate
from blockyard.security.keys import Key, KeyRing, KeyRole, add_key, digest, read_keys
from blockyard.security.tls import CertificateError, CertificateFiles, server_credentials
from tests.kit.authority import Authority
from tests.kit.fakes.fake_gateway import FakeGateway
from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
ONCE = RetryPolicy(max_attempts=1, resume_seconds=0.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "pki")


@pytest.fixture
def guarded(tmp_path: Path, authority: Authority) -> Iterator[FakeGateway]:
    """A gateway with TLS that asks for the key `k` and for a certificate."""
    path = tmp_path / "server-keys.yaml"
    add_key(path, Key(name="one", sha256=digest("k"), tenant="acme"))
    pair = authority.issue("server", names=["gateway.example"])
    files = CertificateFiles(str(pair.certificate), str(pair.key), str(authority.certificate))
    gate = KeyGate(KeyRing(str(path)), KeyRole.USER)
    with FakeGateway(gate=gate, credentials=server_credentials(files)).in_thread() as running:
        yield running


@pytest.fixture
def tls(authority: Authority) -> ClientTls:
    return authority.client(authority.issue("client"))


def test_a_client_shows_its_key_and_its_certificate(guarded: FakeGateway, tls: ClientTls) -> None:
    with Client(guarded.target, api_key="k", tls=tls) as client:
        client.wait_until_ready(timeout=10)
        assert client.generate("a b", max_tokens=2).choices[0].text
        with client.stream("a b", max_tokens=2) as stream:
            assert stream.result().choices[0].text


async def test_a_client_for_asyncio_does_too(guarded: FakeGateway, tls: ClientTls) -> None:
    async with AsyncClient(guarded.target, api_key="k", tls=tls) as client:
        await client.wait_until_ready(timeout=10)
        assert (await client.generate("a b", max_tokens=2)).choices[0].text


@pytest.mark.parametrize("key", ["", "x"])
def test_a_refusal_is_told_at_once(guarded: FakeGateway, tls: ClientTls, key: str) -> None:
    with Client(guarded.target, api_key=key, tls=tls) as client:
        # Trying again would not help: a client that has all its tries does not use them.
        with pytest.raises(BlockyardError) as raised:
            client.generate("a b")
        assert raised.value.reason is Reason.UNAUTHENTICATED
        with pytest.raises(BlockyardError) as raised:
            client.list_models()
        assert raised.value.reason is Reason.UNAUTHENTICATED


def test_without_a_certificate_nobody_is_reached(guarded: FakeGateway, authority: Authority) -> None:
    for tls in (False, authority.client(), True):
        with Client(guarded.target, api_key="k", tls=tls, retry=ONCE) as client:
            with pytest.raises(BlockyardError) as raised:
                client.list_models()
            assert raised.value.reason is Reason.NO_READY_WORKER


def test_the_servers_name_may_be_told(guarded: FakeGateway, tls: ClientTls) -> None:
    for name, is_good in (("gateway.example", True), ("another.example", False)):
        named = ClientTls(tls.authority, tls.certificate, tls.key, name)
        with Client(guarded.target, api_key="k", tls=named, retry=ONCE) as client:
            if is_good:
                assert client.list_models()
            else:
                with pytest.raises(BlockyardError):
                    client.list_models()


def test_what_is_wrong_with_the_files_is_told_at_once(tmp_path: Path) -> None:
    for told in (ClientTls(authority=str(tmp_path / "none.pem")), ClientTls(certificate="a", key="")):
        for make in (Client, AsyncClient):
            with pytest.raises(CertificateError, match=r"none\.pem|go together"):
                make("127.0.0.1:1", tls=told)


@pytest.mark.parametrize("key", ["a b", "a\nb", "ä", "x" * 513])
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        Client("127.0.0.1:1", api_key=key)
    assert raised.value.reason is Reason.FIELD_INVALID
    assert raised.value.violations[0].field == "api_key"
    assert key not in str(raised.value)


# Commands.


def options(tls: ClientTls, key: str = "k") -> list[str]:
    return [
        f"--api-key={key}",
        f"--tls-authority={tls.authority}",
        f"--client-certificate={tls.certificate}",
        f"--client-key={tls.key}",
        "--tls-server-name=gateway.example",
    ]


def test_commands_get_in_by_options(guarded: FakeGateway, tls: ClientTls, capsys: Captured) -> None:
    assert run(*options(tls), "generate", "a b c", "--target", guarded.target) == 0
    assert capsys.readouterr().out.strip()
    bench = ["bench", "--target", guarded.target, "--num-requests=2", "--concurrency=1", "--warmup=0"]
    assert run(*options(tls), *bench) == 0
    assert run(*options(tls, "x"), "generate", "a b c", "--target", guarded.target) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err


def test_commands_get_in_by_the_environment(
    guarded: FakeGateway, tls: ClientTls, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("API_KEY", "k"),
        ("TLS_AUTHORITY", tls.authority),
        ("CLIENT_CERTIFICATE", tls.certificate),
        ("CLIENT_KEY", tls.key),
        ("TARGET", guarded.target),
    ):
        monkeypatch.setenv(f"BLOCKYARD_{name}", value)
    assert run("generate", "a b c") == 0
    assert capsys.readouterr().out.strip()


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    assert run("--tls-authority", str(tmp_path / "none.pem"), "generate", "a") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "none.pem" in line


def test_a_key_is_printed_once_and_its_hash_kept(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "keys.yaml"
    assert run("keys", "make", "alice", "--file", str(path)) == 0
    secret = capsys.readouterr().out.strip()
    assert re.fullmatch(r"blockyard-\S{43}", secret)
    assert read_keys(path) == [Key(name="alice", sha256=digest(secret), tenant="alice")]
    assert secret not in path.read_text()


def test_a_key_is_made_as_told(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    monkeypatch.setenv("BLOCKYARD_API_KEYS_FILE", str(path))
    assert run("keys", "make", "ops", "--role", "admin", "--expires", "2030-01-31") == 0
    assert run("keys", "make", "proxy", "--tenant", "*", "--max-calls", "5", "--expires", "90d") == 0
    ops, proxy = read_keys(path)
    assert (ops.role, ops.tenant, ops.expires) == (KeyRole.ADMIN, "ops", datetime(2030, 1, 31, tzinfo=UTC))
    assert (proxy.role, proxy.tenant, proxy.max_calls) == (KeyRole.USER, "*", 5)
    assert proxy.expires is not None
    assert abs(proxy.expires - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=1)
    capsys.readouterr()
    assert run("keys", "list") == 0
    told = capsys.readouterr().out
    for part in ("ops", "admin", "2030-01-31 00:00 UTC", "proxy", "*", "5"):
        assert part in told
    assert run("keys", "revoke", "ops") == 0
    assert [key.name for key in read_keys(path)] == ["proxy"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["make", "a/b"], 2, "NAME"),
        (["make", "a", "--tenant", "a b"], 2, "--tenant"),
        (["make", "a", "--role", "root"], 2, "role"),
        (["make", "a", "--expires", "soon"], 2, "--expires"),
        (["make", "taken"], 1, "has a key of the name taken"),
        (["revoke", "nobody"], 1, "no key of the name nobody"),
    ],
)
def test_what_cannot_be_done_is_told(
    tmp_path: Path, capsys: Captured, arguments: list[str], code: int, told: str
) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, Key(name="taken", sha256=digest("x"), tenant="t"))
    assert run("keys", *arguments, "--file", str(path)) == code
    out, err = capsys.readouterr()
    assert told in err
    assert out == ""
    assert len(read_keys(path)) == 1


def test_an_expired_key_is_listed_as_such(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, Key(name="old", sha256=digest("x"), tenant="t", expires=datetime(2020, 1, 1, tzinfo=UTC)))
    assert run("keys", "list", "--file", str(path)) == 0
    assert "(expired)" in capsys.readouterr().out
