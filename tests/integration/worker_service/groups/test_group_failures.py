"""Ranks as processes that are killed and stopped while a group is formed, in steps, and between: others live on."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from blockyard.errors import Reason, from_status
from blockyard.service.faults import VARIABLE
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.ranks import Ranks
from tests.kit.processes.system import Service
from tests.unit.worker_service.driver import StepDriver, fails, new_sequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

FIRST = {"new_sequences": [new_sequence(1, [5, 6, 7], [1])], "sequence_ids": [1], "num_new_tokens": [3]}
NEXT = {"sequence_ids": [1], "num_new_tokens": [1]}
GLOO = pb.FormGroupResponse(kind=pb.COLLECTIVES_KIND_GLOO)


class Processes:
    """Two workers as processes. Rank 0 stays; rank 1 is started again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_started = 0
        self.epoch = 0
        self.services = [self._start(0), self._start(1)]
        for service in self.services:
            service.wait_for_log("listening")

    def address(self, rank: int) -> str:
        return f"unix:{self._folder}/{rank}"

    def _start(self, rank: int, fault: str = "") -> Service:
        self._num_started += 1
        flags = ["--worker-address", self.address(rank), "--worker-device", "cpu", "--num-threads", "1"]
        return Service("worker_service", flags, self._folder / f"log{self._num_started}", {VARIABLE: fault})

    def start_second(self, fault: str = "") -> None:
        """Starts another rank 1, which does something to itself."""
        second = self.services[1]
        if second.process.poll() is None:
            second.process.kill()
        second.wait()
        self.services[1] = self._start(1, fault)
        self.services[1].wait_for_log("listening")

    def signal_second(self, number: int) -> None:
        self.services[1].process.send_signal(number)

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def stop(self) -> None:
        for service in self.services:
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)
                service.stop()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(tmp_path_factory.mktemp("g"))
    yield started
    started.stop()


@pytest.fixture
async def pair(processes: Processes) -> AsyncIterator[Ranks]:
    """Both ranks, whoever they are at this moment."""
    channels = [internal_channel(processes.address(rank)) for rank in (0, 1)]
    yield Ranks(channels, processes.address(0))
    for channel in channels:
        await channel.close()


async def set_up(pair: Ranks) -> None:
    """Sets up the ranks that are not."""
    await pair.prepare(tiny_model("llama"), 2)


async def form(pair: Ranks, epoch: int) -> None:
    """Forms a group, and has the ranks that have no cache make one."""
    assert await pair.form(epoch) == [GLOO, GLOO]
    await pair.make_caches()


async def form_again(pair: Ranks, processes: Processes, survivor: str) -> None:
    """Forms the next group of a survivor and whoever is there as rank 1, and does a step."""
    assert (await pair.infos())[0].HasField("cache"), "rank 0 lost what it had loaded"
    await set_up(pair)
    assert (await pair.members())[0] == survivor, "rank 0 was started again"
    epoch = processes.next_epoch()
    await form(pair, epoch)
    streams = [StepDriver(stub.ExecuteModel(), epoch) for stub in pair.stubs]
    first, second = await asyncio.gather(*[stream.step(**FIRST) for stream in streams])
    assert first.input_digest == second.input_digest
    for stream in streams:
        stream.call.cancel()


async def begin_steps(pair: Ranks, processes: Processes) -> tuple[str, list[StepDriver]]:
    """Does the first step of a group; gives rank 0's incarnation, and the streams."""
    await set_up(pair)
    survivor, _ = await pair.members()
    epoch = processes.next_epoch()
    await form(pair, epoch)
    streams = [StepDriver(stub.ExecuteModel(), epoch) for stub in pair.stubs]
    await asyncio.gather(*[stream.step(**FIRST) for stream in streams])
    return survivor, streams


async def test_a_rank_that_is_stopped_between_groups_comes_too_late(pair: Ranks, processes: Processes) -> None:
    await set_up(pair)
    survivor, _ = await pair.members()
    await form(pair, processes.next_epoch())
    request = await pair.request(processes.next_epoch(), timeout={"seconds": 1})
    processes.signal_second(signal.SIGSTOP)
    calls = [stub.FormGroup(request) for stub in pair.stubs]
    assert "rank 1 did not join" in (await fails(calls[0])).message
    processes.signal_second(signal.SIGCONT)
    await fails(calls[1])
    await form_again(pair, processes, survivor)


async def test_a_rank_that_hangs_in_a_step(pair: Ranks, processes: Processes) -> None:
    survivor, streams = await begin_steps(pair, processes)
    _, stopped = await pair.members()
    processes.signal_second(signal.SIGSTOP)
    for stream in streams:
        await stream.send(**NEXT, step_timeout={"seconds": 1})
    assert from_status((await streams[0].answer()).refusal).reason is Reason.GROUP_BROKEN
    processes.signal_second(signal.SIGCONT)
    assert from_status((await streams[1].answer()).refusal).reason is Reason.GROUP_BROKEN
    # It is whole, and need not start again.
    assert (await pair.members())[1] == stopped
    await form_again(pair, processes, survivor)


async def test_a_rank_that_dies_in_a_step(pair: Ranks, processes: Processes) -> None:
    survivor, streams = await begin_steps(pair, processes)
    await streams[0].send(**NEXT, step_timeout={"seconds": 60})
    await pair.wait_for(0, lambda info: not info.group.reusable)
    processes.signal_second(signal.SIGKILL)
    assert from_status((await streams[0].answer()).refusal).reason is Reason.GROUP_BROKEN
    processes.start_second()
    await form_again(pair, processes, survivor)


async def test_a_rank_that_hangs_while_a_group_is_formed(pair: Ranks, processes: Processes) -> None:
    processes.start_second("group.in_collective:hang")
    await set_up(pair)
    survivor, _ = await pair.members()
    request = await pair.request(processes.next_epoch(), timeout={"seconds": 1})
    calls = [stub.FormGroup(request) for stub in pair.stubs]
    assert (await fails(calls[0])).reason is Reason.GROUP_BROKEN
    processes.signal_second(signal.SIGCONT)
    await fails(calls[1])
    await form_again(pair, processes, survivor)


async def test_a_rank_that_dies_while_a_group_is_formed(pair: Ranks, processes: Processes) -> None:
    processes.start_second("group.in_collective:kill")
    await set_up(pair)
    survivor, _ = await pair.members()
    epoch = processes.next_epoch()
    request = await pair.request(epoch, timeout={"seconds": 60})
    calls = [stub.FormGroup(request) for stub in pair.stubs]
    await fails(calls[1])
    assert processes.services[1].process.wait(20) == -signal.SIGKILL
    # What the scheduler does when a rank is lost.
    await pair.stubs[0].LeaveGroup(pb.LeaveGroupRequest(epoch=epoch, reason="rank 1 died"))
    assert (await fails(calls[0])).reason is Reason.GROUP_BROKEN
    processes.start_second()
    await form_again(pair, processes, survivor)
