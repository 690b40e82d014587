"""A system in the background: the real services and the demo model, called as a user calls them."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.user import User

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAGS = ("--num-device-blocks=60", "--num-host-blocks=0", "--num-threads=1", "--grpc-port=0", "--admin-port=0")


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    user = User(tmp_path / "state")
    yield user
    user.call("stop", "--all", "--now")


def test_up_serves_until_down(user: User) -> None:
    out = user.call("up", "demo", "--http-port=0", *FLAGS).stdout
    assert out.startswith("ready: demo at http://127.0.0.1:")
    (entry,) = json.loads(user.call("ps", "--json").stdout)
    assert (entry["name"], entry["command"], entry["state"]) == ("demo", "up", "ready")
    assert len(user.call("run", "demo", "--max-tokens=5", "--temperature=0", piped="def f(").stdout) > 1
    assert "request finished" in user.call("logs").stdout, "run asked the system that was there"
    assert user.call("down").stdout == "stopped demo\n"
    assert json.loads(user.call("ps", "--json").stdout) == []
    assert "stopping" in user.call("logs", "demo", "-n", "5").stdout


def test_up_says_why_a_system_does_not_start(user: User) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = user.call("up", f"--http-port={port}", *FLAGS, code=1).stderr
    assert err.startswith("error: the system ended with 1 before it was ready:")
    assert f"cannot listen on 127.0.0.1:{port}" in err
