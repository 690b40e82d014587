"""Ranks as processes that are killed and stopped while their group is formed, and between: the others form the next."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import grpc
import pytest

from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.service.faults import VARIABLE
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.processes.ranks import Ranks
from tests.kit.processes.system import Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

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
    for rank, info in enumerate(await pair.infos()):
        if not info.configuration_digest:
            parallel = pb.Parallel(tensor_parallel_size=2, pipeline_parallel_size=1, rank=rank)
            request = pb.InitDeviceRequest(
                device_type=pb.DEVICE_TYPE_CPU, configuration_digest="set up", parallel=parallel
            )
            await pair.stubs[rank].InitDevice(request)


def error_of(answer: object) -> BlockyardError:
    assert isinstance(answer, grpc.aio.AioRpcError), answer
    return from_rpc_error(answer)


async def form_again(pair: Ranks, processes: Processes, survivor: str) -> None:
    """Forms the next group of a survivor and whoever is there as rank 1."""
    await set_up(pair)
    assert (await pair.members())[0] == survivor, "rank 0 was started again"
    assert await pair.form(processes.next_epoch()) == [GLOO, GLOO]


async def test_a_rank_that_dies_between_groups_is_replaced_in_the_next(pair: Ranks, processes: Processes) -> None:
    await set_up(pair)
    survivor, _ = await pair.members()
    assert await pair.form(processes.next_epoch()) == [GLOO, GLOO]
    processes.start_second()
    await form_again(pair, processes, survivor)


async def test_a_rank_that_dies_while_a_group_is_formed(pair: Ranks, processes: Processes) -> None:
    processes.start_second("group.in_collective:kill")
    await set_up(pair)
    survivor, _ = await pair.members()
    epoch = processes.next_epoch()
    request = await pair.request(epoch, timeout={"seconds": 60})
    calls = [stub.FormGroup(request) for stub in pair.stubs]
    with pytest.raises(grpc.aio.AioRpcError):
        await calls[1]
    assert processes.services[1].process.wait(20) == -signal.SIGKILL
    # What the scheduler does when a rank is lost.
    await pair.stubs[0].LeaveGroup(pb.LeaveGroupRequest(epoch=epoch, reason="rank 1 died"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await calls[0]
    assert from_rpc_error(raised.value).reason is Reason.GROUP_BROKEN
    processes.start_second()
    await form_again(pair, processes, survivor)


async def test_a_rank_that_hangs_while_a_group_is_formed(pair: Ranks, processes: Processes) -> None:
    processes.start_second("group.in_collective:hang")
    await set_up(pair)
    survivor, stopped = await pair.members()
    request = await pair.request(processes.next_epoch(), timeout={"seconds": 1})
    calls = [stub.FormGroup(request) for stub in pair.stubs]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await calls[0]
    assert from_rpc_error(raised.value).reason is Reason.GROUP_BROKEN
    os.kill(processes.services[1].process.pid, signal.SIGCONT)
    with pytest.raises(grpc.aio.AioRpcError):
        await calls[1]
    # It is whole, and need not start again.
    assert (await pair.members())[1] == stopped
    await form_again(pair, processes, survivor)


async def test_a_rank_that_is_stopped_between_groups_comes_in_time_or_not(pair: Ranks, processes: Processes) -> None:
    await set_up(pair)
    survivor, _ = await pair.members()
    assert await pair.form(processes.next_epoch()) == [GLOO, GLOO]
    request = await pair.request(processes.next_epoch(), timeout={"seconds": 1})
    os.kill(processes.services[1].process.pid, signal.SIGSTOP)
    calls = [stub.FormGroup(request) for stub in pair.stubs]
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await calls[0]
    assert "rank 1 did not come" in from_rpc_error(raised.value).message
    os.kill(processes.services[1].process.pid, signal.SIGCONT)
    with pytest.raises(grpc.aio.AioRpcError):
        await calls[1]
    await form_again(pair, processes, survivor)
