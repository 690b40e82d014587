"""What each look at a machine makes of what it sees."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.capacity.memory import ControlGroups
from blockyard.cli.doctor.findings import Finding, Level
from blockyard.cli.doctor.kernels import read_answer
from blockyard.cli.doctor.machine import (
    CLOCK_ERROR,
    look_at_clock,
    look_at_files,
    look_at_grammars,
    look_at_huge_pages,
    look_at_memory,
)
from blockyard.cli.doctor.services import look_at_certificate, look_at_settings
from blockyard.configuration import InternalSecuritySettings, SystemConfiguration
from blockyard.settings import resolve
from tests.kit.authority import Authority

if TYPE_CHECKING:
    from pathlib import Path


def level(finding: Finding) -> Level:
    """The level; what is not ok says what to do."""
    assert (finding.level is Level.OK) == (not finding.advice)
    return finding.level


@pytest.mark.parametrize(
    ("modes", "expected"), [("always [madvise] never", "ok"), ("always madvise [never]", "warn"), ("", "ok")]
)
def test_huge_pages(modes: str, expected: str) -> None:
    assert level(look_at_huge_pages(modes)) == expected


@pytest.mark.parametrize(("most", "expected"), [(1024, "warn"), (1 << 20, "ok"), (-1, "ok")])
def test_open_files(most: int, expected: str) -> None:
    assert level(look_at_files(most, max_connections=4096)) == expected


@pytest.mark.parametrize(("state", "expected"), [(0, "ok"), (CLOCK_ERROR, "warn"), (None, "ok")])
def test_the_clock(state: int | None, expected: str) -> None:
    assert level(look_at_clock(state)) == expected


@pytest.mark.parametrize(("version", "expected"), [("1.9.1", "ok"), ("", "warn")])
def test_grammars(version: str, expected: str) -> None:
    assert level(look_at_grammars(version)) == expected


def test_memory_is_what_a_control_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/")
    (tmp_path / "memory.max").write_text(str(1 << 29))
    (tmp_path / "memory.current").write_text(str(1 << 28))
    found = look_at_memory(ControlGroups(tmp_path, tmp_path / "membership"))
    assert level(found) == "warn"
    assert found.text == "256 MiB free of 512 MiB (a control group's limit)"


@pytest.mark.parametrize(
    ("kernels", "warnings", "expected"),
    [
        ("cpu/avx2", [], "ok"),
        ("cpu/avx2", ["no avx512 kernels: they fail their self-test"], "warn"),
        ("reference", ["were not built"], "warn"),
        ("", ["no kernels for amx"], "fail"),
    ],
)
def test_kernels(kernels: str, warnings: list[str], expected: str) -> None:
    device: dict[str, Any] = {"device": "cpu", "name": "AVX2", "kernels": kernels, "warnings": warnings}
    torch, found = read_answer({"torch": "2.13", "triton": True, "devices": [device]})
    assert level(torch) == "ok"
    assert level(found) == expected
    assert all(warning in found.text for warning in warnings)


def settings_findings(internal: InternalSecuritySettings | None = None, **settings: Any) -> dict[str, Finding]:
    ports = {"grpc_port": 0, "http_port": 0, "admin_port": 0}
    configuration = resolve(SystemConfiguration, ports | settings, environment={})
    found = look_at_settings(configuration, internal or InternalSecuritySettings())
    return {finding.subject: finding for finding in found}


def test_nothing_is_said_of_what_is_not_used() -> None:
    assert {name: level(found) for name, found in settings_findings().items()} == {"ports": "ok"}


def test_an_open_admin_api_fails() -> None:
    found = settings_findings(admin_host="0.0.0.0")
    assert level(found["admin API"]) == "fail"


def test_files_that_cannot_be_read_fail(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    internal = InternalSecuritySettings(internal_certificate=missing)
    found = settings_findings(internal, api_keys_file=missing, tls_certificate=missing, tls_key=missing)
    assert {name for name in found if level(found[name]) == "fail"} == {
        "API keys",
        "public certificate",
        "internal certificate",
    }
    assert missing in found["public certificate"].text


@pytest.mark.parametrize(("days", "expected"), [(0.1, "ok"), (0.9, "warn"), (1.1, "fail"), (-3.0, "fail")])
def test_a_certificate_ends(tmp_path: Path, days: float, expected: str) -> None:
    pair = Authority(tmp_path).issue("gateway")
    found = look_at_certificate("certificate", pair.certificate.read_bytes(), time.time() + days * 86400)
    assert level(found) == expected
