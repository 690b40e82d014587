"""The first signal ends a service well, the second at once, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from blockyard.local.supervisor import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ends well, unless it is told to hang: then its loop never turns again.
PROGRAM = """
import asyncio, sys
from blockyard.service.signals import on_stop_signal

def stop():
    print("stopping", flush=True)
    while "hang" in sys.argv:
        pass
    stopping.set()

async def main():
    on_stop_signal(stop)
    print("started", flush=True)
    await stopping.wait()

stopping = asyncio.Event()
asyncio.run(main())
"""


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, request.param]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
        process.kill()


@pytest.mark.parametrize("program", [""], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_it_end_well(program: subprocess.Popen[str], number: signal.Signals) -> None:
    program.send_signal(number)
    assert program.wait(20) == 0
    assert program.stdout is not None
    assert program.stdout.read() == "stopping\n"


@pytest.mark.parametrize("program", ["hang"], indirect=True)
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_ends_it_at_once(
    program: subprocess.Popen[str], first: signal.Signals, second: signal.Signals
) -> None:
    program.send_signal(first)
    assert program.stdout is not None
    assert program.stdout.readline() == "stopping\n"
    program.send_signal(second)
    assert program.wait(20) == -second
