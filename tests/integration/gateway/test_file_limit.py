"""The limit of open files, as a gateway's process finds it."""

from __future__ import annotations

import subprocess
import sys

import pytest

GATEWAY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
from gateway.server import main
main(sys.argv[1:])
"""
FLAGS = ("--grpc-port=0", "--http-port=0", "--admin-port=0", "--drain-seconds=0", "--log-format=json")


@pytest.mark.parametrize(("max_connections", "warns"), [(300, False), (301, True)])
@pytest.mark.timeout(60)
def test_a_gateway_that_may_open_fewer_files_than_connections_says_so(max_connections: int, warns: bool) -> None:
    command = [sys.executable, "-c", GATEWAY, *FLAGS, f"--max-connections={max_connections}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        assert gateway.stderr is not None
        lines: list[str] = []
        while not any("listening" in line for line in lines):
            lines.append(gateway.stderr.readline())
            assert lines[-1], lines
        gateway.kill()
        gateway.stderr.read()
    assert any("the limit of open files is below" in line for line in lines) is warns
