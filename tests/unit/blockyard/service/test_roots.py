"""A thread or a task that nobody waits for ends its process when it fails, with one line of the log."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from blockyard.service import roots
from tests.kit.panics import panic

ERRORS: list[Any] = [ValueError("a bug"), SystemExit(0), KeyboardInterrupt()]


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ended: list[int] = []
    monkeypatch.setattr(roots, "end_process", ended.append)
    return ended


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_thread_that_fails_ends_the_process(
    error: BaseException, codes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    thread = roots.make_thread(lambda: fail(error), "worker")
    thread.start()
    thread.join(10)
    assert codes == [roots.EXIT_CODE]
    [record] = caplog.records
    assert record.getMessage() == "a thread failed: the process ends"
    assert record.fields == {"name": "worker", "exit_code": roots.EXIT_CODE}  # type: ignore[attr-defined]
    assert record.exc_info
    assert record.exc_info[1] is error


def test_a_panic_in_a_thread_ends_the_process(codes: list[int]) -> None:
    thread = roots.make_thread(panic, "worker")
    thread.start()
    thread.join(10)
    assert codes == [roots.EXIT_CODE]


def test_a_thread_that_returns_ends_nothing(codes: list[int]) -> None:
    thread = roots.make_thread(lambda: None, "worker")
    assert thread.daemon
    thread.start()
    thread.join(10)
    assert codes == []


@pytest.mark.parametrize("work", [lambda: fail(ValueError("a bug")), panic], ids=["error", "panic"])
async def test_a_task_that_fails_ends_the_process(
    work: Any, codes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        work()

    task = roots.start_task(run(), "link")
    await asyncio.wait({task})
    await asyncio.sleep(0)
    assert codes == [roots.EXIT_CODE]
    assert [record.getMessage() for record in caplog.records] == ["a task failed: the process ends"]
    assert task.get_name() == "link"


async def test_a_task_that_is_cancelled_or_returns_ends_nothing(codes: list[int]) -> None:
    waiting = roots.start_task(asyncio.Event().wait(), "link")
    returning = roots.start_task(asyncio.sleep(0), "other")
    await asyncio.wait({returning})
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0)
    assert codes == []


def test_a_process_ends_at_once_with_its_log() -> None:
    program = """
import sys, time
from blockyard.service.roots import make_thread
from blockyard.telemetry import configure_logging
configure_logging("worker")
make_thread(lambda: sys.exit(0), "device").start()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == roots.EXIT_CODE
    lines = [line for line in done.stderr.splitlines() if "a thread failed: the process ends" in line]
    assert len(lines) == 1
    assert "name=device" in lines[0]
