"""The container's health check against a real health server."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from blockyard.service.health import HealthServer
from blockyard.service.healthcheck import check, main

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def address() -> Iterator[str]:
    server = HealthServer(lambda: True, lambda: False)
    yield f"127.0.0.1:{server.start('127.0.0.1:0')}"
    server.stop()


def test_tells_what_a_service_says(address: str) -> None:
    assert check(address, "liveness") == ""
    assert check(address) == f"{address}: readiness is NOT_SERVING"


def test_tells_that_nobody_answers() -> None:
    assert check("127.0.0.1:1").startswith("127.0.0.1:1: UNAVAILABLE: ")


def test_tells_that_a_service_is_unknown(address: str) -> None:
    assert check(address, "nothing").startswith(f"{address}: NOT_FOUND")


def test_the_program_exits_with_what_it_found(address: str) -> None:
    command = [sys.executable, "-m", "blockyard.service.healthcheck", address]
    assert subprocess.run([*command, "liveness"], check=False, timeout=30).returncode == 0
    failed = subprocess.run(command, check=False, timeout=30, capture_output=True, text=True)
    assert (failed.returncode, failed.stderr) == (1, f"{address}: readiness is NOT_SERVING\n")


def test_the_program_wants_an_address() -> None:
    with pytest.raises(SystemExit, match="usage"):
        main([])
