"""The first signal ends a service well, the second at once, whatever it is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from blockyard.local.supervisor import ROOT
from tests.kit.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ends well, unless it is told to hang or to be stuck: its loop does not turn from the first signal on, or before it.
PROGRAM = """
import asyncio, sys
from blockyard.service import signals
from blockyard.service.signals import on_stop_signal

def stop():
    print("stopping", flush=True)
    while "hang" in sys.argv:
        pass
    stopping.set()

async def main():
    if "soon" in sys.argv:
        signals.STUCK_SECONDS = 0.1
    on_stop_signal(stop)
    print("started", flush=True)
    while "stuck" in sys.argv:
        pass
    if "closed" not in sys.argv:
        await stopping.wait()

stopping = asyncio.Event()
asyncio.run(main())
if "closed" in sys.argv:
    print("closed", flush=True)
    # A signal just before a blocking call would be handled only after it.
    while True:
        pass
"""


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, *request.param.split()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
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


@pytest.mark.parametrize("program", ["stuck"], indirect=True)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_the_second_ends_one_whose_loop_was_stuck_before_the_first(
    program: subprocess.Popen[str], second: signal.Signals
) -> None:
    program.send_signal(signal.SIGTERM)
    # Two signals of one number that meet are one.
    wait_until(lambda: not _catches(program.pid, signal.SIGTERM))
    program.send_signal(second)
    assert program.wait(20) == -second


@pytest.mark.parametrize("program", ["stuck soon"], indirect=True)
def test_a_loop_that_does_not_take_the_first_is_not_waited_for(program: subprocess.Popen[str]) -> None:
    program.send_signal(signal.SIGTERM)
    assert program.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("program", ["closed"], indirect=True)
def test_a_signal_after_the_loop_has_ended_ends_the_process(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    assert program.stdout.readline() == "closed\n"
    program.send_signal(signal.SIGTERM)
    assert program.wait(20) == -signal.SIGTERM


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process catches a signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
