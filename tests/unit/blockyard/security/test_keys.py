"""The file of keys: written, read, read again when it changes, and what is wrong with it told."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.security import keys
from blockyard.security.keys import (
    Key,
    KeyFileError,
    KeyRing,
    KeyRole,
    add_key,
    digest,
    make_secret,
    parse_keys,
    read_keys,
    revoke_key,
)

if TYPE_CHECKING:
    from pathlib import Path

HASH = "0" * 64


def entry(name: str = "one", secret: str = "", **fields: object) -> Key:
    return Key(name=name, sha256=digest(secret or f"secret of {name}"), tenant=name, **fields)  # type: ignore[arg-type]


class Clock:
    """Time that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_unlike_all_others_and_fit_for_a_header() -> None:
    secrets = {make_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch(r"blockyard-[A-Za-z0-9_-]{43}", secret) for secret in secrets)


def test_what_is_added_is_read_and_found(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    told = [
        entry("one"),
        entry("two", role=KeyRole.ADMIN, expires=datetime(2030, 1, 31, tzinfo=UTC)),
        Key(name="proxy", sha256=digest("x"), tenant="*", max_calls=3),
    ]
    for key in told:
        add_key(path, key)
    assert read_keys(path) == told
    ring = KeyRing(str(path))
    assert ring.find("x") == told[2]
    assert ring.find("secret of one") == told[0]
    assert ring.find("") is ring.find("y") is ring.find(digest("x")) is None


def test_the_file_is_its_owners_alone_and_holds_no_key(tmp_path: Path) -> None:
    path, secret = tmp_path / "keys.yaml", make_secret()
    add_key(path, entry("one", secret))
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text()
    revoke_key(path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == []
    assert list(tmp_path.iterdir()) == [path]


def test_revoking_takes_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for name in ("one", "two", "three"):
        add_key(path, entry(name))
    revoke_key(path, "two")
    assert [key.name for key in read_keys(path)] == ["one", "three"]
    with pytest.raises(KeyFileError, match="no key of the name two"):
        revoke_key(path, "two")


def test_who_could_read_the_file_still_can(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, entry("one"))
    path.chmod(0o640)
    revoke_key(path, "one")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_name_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    add_key(path, entry("one"))
    with pytest.raises(KeyFileError, match="has a key of the name one"):
        add_key(path, entry("one", "another"))
    assert read_keys(path) == [entry("one")]


def test_a_file_that_is_written_by_hand() -> None:
    (key,) = parse_keys(f"# mine\n- {{name: a, sha256: '{HASH}', tenant: t, expires: 2030-01-31}}\n")
    assert (key.role, key.max_calls) == (KeyRole.USER, 0)
    assert key.expires == datetime(2030, 1, 31, tzinfo=UTC)
    assert key.is_expired(key.expires.timestamp())
    assert not key.is_expired(key.expires.timestamp() - 0.001)
    assert parse_keys("") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {name: a", "not YAML"),
        ("name: a", "valid list"),
        ("- a", "0: .*dict"),
        (f"- {{name: a, sha256: '{HASH}'}}", "0.tenant: Field required"),
        (f"- {{name: a/b, sha256: '{HASH}', tenant: t}}", "0.name"),
        (f"- {{name: a, sha256: '{HASH}', tenant: 'a/b'}}", "0.tenant"),
        (f"- {{name: a, sha256: '{HASH}', tenant: t, role: root}}", "0.role"),
        (f"- {{name: a, sha256: '{HASH}', tenant: t, max_calls: -1}}", "0.max_calls"),
        (f"- {{name: a, sha256: '{HASH}', tenant: t, rolle: user}}", "0.rolle"),
        (f"- {{name: a, sha256: '{HASH}', tenant: t}}\n- {{name: a, sha256: '{'1' * 64}', tenant: t}}", "the name a"),
        (f"- {{name: a, sha256: '{HASH}', tenant: t}}\n- {{name: b, sha256: '{HASH}', tenant: t}}", "the sha256 0"),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str) -> None:
    with pytest.raises(KeyFileError, match=told):
        parse_keys(text)


def test_a_key_in_the_place_of_its_hash_is_not_told() -> None:
    secret = make_secret()
    with pytest.raises(KeyFileError) as raised:
        parse_keys(f"- {{name: a, sha256: {secret}, tenant: t}}")
    assert secret not in str(raised.value)
    assert "0.sha256" in str(raised.value)


@given(st.text(max_size=200))
def test_any_text_is_keys_or_an_error(text: str) -> None:
    with suppress(KeyFileError):
        assert all(isinstance(key, Key) for key in parse_keys(text))


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"- 1"])
def test_a_file_that_cannot_be_used_at_the_start_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"keys\.yaml: "):
        KeyRing(str(path))


def test_a_changed_file_is_read_again_within_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys.yaml", Clock()
    add_key(path, entry("one"))
    ring = KeyRing(str(path), clock)
    add_key(path, entry("two"))
    assert ring.find("secret of two") is None
    clock.now += keys.LOOK_SECONDS
    assert ring.find("secret of two") == entry("two")
    revoke_key(path, "one")
    clock.now += keys.LOOK_SECONDS
    assert ring.find("secret of one") is None
    assert ring.find("secret of two") == entry("two")
    with caplog.at_level(logging.ERROR):
        path.write_text("- nothing")
        clock.now += keys.LOOK_SECONDS
        assert ring.find("secret of two") == entry("two")
        clock.now += keys.LOOK_SECONDS
        assert ring.find("secret of two") == entry("two")
        path.unlink()
        clock.now += keys.LOOK_SECONDS
        assert ring.find("secret of two") == entry("two")
    assert len(caplog.records) == 2, "told once for each change"
    add_key(path, entry("three"))
    clock.now += keys.LOOK_SECONDS
    assert ring.find("secret of two") is None
    assert ring.find("secret of three") == entry("three")
