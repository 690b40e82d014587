"""What ends a process: a device thread that stays in an operation of a group that has ended."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import GroupRequest
from blockyard.errors import BlockyardError
from tests.kit.waiting import until
from worker_service.device.thread import DeviceThread
from worker_service.groups import membership as module
from worker_service.groups.joining import Route
from worker_service.groups.membership import Membership

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from worker_service.collectives.group import RankGroup

CPU = torch.device("cpu")
Formed = tuple[Membership, list[int]]


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    """A device thread."""
    thread = DeviceThread(1)
    thread.start()
    yield thread
    assert thread.stop(20)


@pytest.fixture
async def formed(thread: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Formed]:
    """A member of a whole group, and the exit codes that its process ended with."""
    monkeypatch.setattr(module, "RETURN_SECONDS", 0.0)
    codes: list[int] = []
    first = Membership(thread, "a", end_process=codes.append)
    secret = first.open_rendezvous(Parallel(2, 1, 0), 1)
    other_thread = DeviceThread(1)
    other_thread.start()
    second = Membership(other_thread, "b", connect=lambda request: _Nearby(first, request))
    request = GroupRequest(1, "unix:/nowhere", secret, ("a", "b"), 20.0)
    await asyncio.gather(first.form(Parallel(2, 1, 0), CPU, request), second.form(Parallel(2, 1, 1), CPU, request))
    yield first, codes
    await second.leave(1, "the test is over")
    assert other_thread.stop(20)


class _Nearby:
    """The way to a meeting point in this process."""

    def __init__(self, first: Membership, request: GroupRequest) -> None:
        point = first.meeting_point(request.epoch, request.secret)
        self.set, self.get = point.set, point.get

    async def close(self) -> None:
        pass


@asynccontextmanager
async def working(thread: DeviceThread, group: RankGroup, seconds: float) -> AsyncIterator[None]:
    """Keeps the device thread in work that has so long, and in it until the end of the block."""
    inside, come_back = threading.Event(), threading.Event()

    def work() -> None:
        with group.lifetime.work(seconds):
            inside.set()
            come_back.wait(20)

    thread.post(work)
    await asyncio.to_thread(inside.wait, 20)
    try:
        yield
    finally:
        come_back.set()


def group_of(member: Membership, epoch: int) -> RankGroup:
    group = member.find(epoch)
    assert group is not None
    return group


async def test_a_thread_that_stays_in_an_operation_ends_the_process(formed: Formed, thread: DeviceThread) -> None:
    member, codes = formed
    async with working(thread, group_of(member, 1), 0.01):
        await member.leave(1, "a test")
        await until(lambda: codes == [70], 20)


async def test_a_thread_that_comes_back_ends_nothing(formed: Formed, thread: DeviceThread) -> None:
    member, codes = formed
    async with working(thread, group_of(member, 1), 20):
        await member.leave(1, "a test")
    await until(lambda: not member.watches, 20)
    assert not codes


async def test_a_stream_that_ends_between_steps_leaves_the_group_whole(formed: Formed) -> None:
    member, _ = formed
    member.on_stream_end(2)
    member.on_stream_end(1)
    info = member.info
    assert info is not None
    assert info.reusable


async def test_a_stream_that_ends_in_a_step_ends_the_group(formed: Formed, thread: DeviceThread) -> None:
    member, _ = formed
    group = group_of(member, 1)
    async with working(thread, group, 20):
        member.on_stream_end(1)
        await until(lambda: group.world.is_broken, 20)


async def test_steps_of_a_later_epoch_end_the_group(formed: Formed) -> None:
    member, _ = formed
    group = group_of(member, 1)
    member.on_epoch(1)
    assert not group.world.is_broken
    member.on_epoch(2)
    await until(lambda: group.world.is_broken, 20)
    assert member.find(2) is None


async def test_a_group_is_ended_before_it_has_begun(thread: DeviceThread, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def find_route_late(*arguments: Any) -> Route:
        begun.set()
        go_on.wait(20)
        return Route("gloo", "127.0.0.1")

    monkeypatch.setattr(module, "find_route", find_route_late)
    member = Membership(thread, "a")
    secret = member.open_rendezvous(Parallel(2, 1, 0), 1)
    request = GroupRequest(1, "unix:/nowhere", secret, ("a", "b"), 60.0)
    forming = asyncio.create_task(member.form(Parallel(2, 1, 0), CPU, request))
    await asyncio.to_thread(begun.wait, 20)
    await member.leave(1, "a test")
    go_on.set()
    with pytest.raises(BlockyardError, match="a test"):
        await forming


async def test_a_group_that_fails_leaves_the_next_meeting_point_open(thread: DeviceThread) -> None:
    member = Membership(thread, "a")
    secret = member.open_rendezvous(Parallel(2, 1, 0), 1)
    request = GroupRequest(1, "unix:/nowhere", secret, ("a", "b"), 60.0)
    forming = asyncio.create_task(member.form(Parallel(2, 1, 0), CPU, request))
    await until(lambda: member.info is not None, 20)
    next_secret = member.open_rendezvous(Parallel(2, 1, 0), 2)
    with pytest.raises(BlockyardError):
        await forming
    point = member.meeting_point(2, next_secret)
    await point.set("k", b"v")
    assert await point.get("k") == b"v"
