"""The device thread: order, errors, waits that are given up, stopping."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard.panics import ExtensionPanic
from blockyard.service import roots
from tests.kit.panics import panic
from worker_service.device.thread import DeviceThread, StepJob

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def device() -> Iterator[DeviceThread]:
    thread = DeviceThread(1)
    thread.start()
    yield thread
    assert thread.stop(10)


async def test_work_runs_in_order_in_one_other_thread(device: DeviceThread) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(5):
        device.post(lambda number=number: seen.append((number, threading.get_ident())))
    assert await device.run(lambda: len(seen)) == 5
    assert [number for number, _ in seen] == list(range(5))
    idents = {ident for _, ident in seen}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


async def test_an_error_reaches_who_waits(device: DeviceThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await device.run(lambda: 1 // 0)
    assert await device.run(lambda: 7) == 7


async def test_a_jobs_bug_is_logged_and_does_not_end_the_thread(
    device: DeviceThread, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        device.post(lambda: [][0])
        assert await device.run(lambda: 7) == 7
    assert "a job of the device thread failed" in caplog.text


@pytest.mark.parametrize("begin", ["post", "run", "when_ready"])
async def test_an_exit_in_the_thread_ends_the_process(begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(roots, "end_process", lambda code: loop.call_soon_threadsafe(ended.put_nowait, code))
    thread = DeviceThread(1)
    thread.start()
    waiting: asyncio.Task[None] | None = None
    if begin == "run":
        waiting = asyncio.create_task(thread.run(sys.exit))
    elif begin == "post":
        thread.post(sys.exit)
    else:
        thread.when_ready(Exits(), lambda: None)
    async with asyncio.timeout(10):
        assert await ended.get() == roots.EXIT_CODE
    if waiting is not None:
        # The process would have ended.
        waiting.cancel()
    thread.stop(10)


class Exits:
    """Something that was launched, and is never ready."""

    def wait(self) -> None:
        sys.exit()


class Ready:
    """Something that was launched, and is ready."""

    def wait(self) -> None:
        """Returns at once."""


async def test_the_waiting_thread_has_the_gpu_of_the_devices(
    device: DeviceThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would make a context on the first GPU, which takes half a gigabyte there."""
    current: dict[str, int] = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.get(threading.current_thread().name, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: current.update({threading.current_thread().name: gpu}))
    await device.run(lambda: torch.cuda.set_device(3))
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    told = partial(ready.get_loop().call_soon_threadsafe, ready.set_result, None)
    await device.run(lambda: device.when_ready(Ready(), told))  # type: ignore[arg-type]
    await ready
    assert current == {"device": 3, "device waiter": 3}


@pytest.mark.parametrize("kind", ["run", "call"])
async def test_a_panic_reaches_who_waits_as_an_error(kind: str, device: DeviceThread) -> None:
    with pytest.raises(ExtensionPanic):
        await (device.run(panic) if kind == "run" else asyncio.to_thread(device.call, panic))
    assert await device.run(lambda: 7) == 7


async def test_who_gives_up_waiting_disturbs_nobody(device: DeviceThread) -> None:
    gate = threading.Event()
    waiting = asyncio.create_task(device.run(lambda: gate.wait(10)))
    await asyncio.sleep(0)
    waiting.cancel()
    gate.set()
    assert await device.run(lambda: 7) == 7
    assert waiting.cancelled()


@pytest.mark.parametrize(
    ("following", "expected"),
    [
        (None, ["first", "held", "after"]),
        ("computes", ["first", "second begins", "held", "second ends", "after"]),
        ("computes nothing", ["first", "second begins", "second ends", "held", "after"]),
        ("no step", ["first", "held", "second begins", "second ends", "after"]),
    ],
)
async def test_what_is_held_is_called_when_the_next_step_computes(
    following: str | None, expected: list[str], device: DeviceThread
) -> None:
    said: list[str] = []
    may_begin = threading.Event()

    def first() -> None:
        assert may_begin.wait(10)
        device.hold(lambda: said.append("held"))
        # What is held is not called within a job but by `hold` and `let_go`.
        said.insert(0, "first")

    def second() -> None:
        said.append("second begins")
        if following == "computes":
            device.let_go()
        said.append("second ends")

    device.post(StepJob(first))
    if following is not None:
        device.post(second if following == "no step" else StepJob(second))
    may_begin.set()
    await device.run(lambda: said.append("after"))
    assert said == expected


async def test_the_loop_turns_while_work_runs(device: DeviceThread) -> None:
    gate = threading.Event()
    working = asyncio.create_task(device.run(lambda: gate.wait(10)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not working.done()
    gate.set()
    assert await working


def test_stopping_tells_whether_it_ended() -> None:
    thread = DeviceThread(1)
    thread.start()
    gate = threading.Event()
    thread.post(lambda: gate.wait(10) and None)
    assert not thread.stop(0.01)
    gate.set()
    assert thread.stop(10)
