"""Several workers of one command as processes: they listen, one that is killed comes back, and all end by a signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from blockyard.worker.v1 import worker_pb2_grpc
from tests.kit.processes import nursery
from tests.kit.processes.system import Service

if TYPE_CHECKING:
    import pytest


async def info(address: str) -> pb.GetWorkerInfoResponse:
    async with internal_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return await stub.GetWorkerInfo(pb.GetWorkerInfoRequest(), wait_for_ready=True, timeout=60)


def children_of(pid: int) -> dict[str, int]:
    """The process ids of the workers by their addresses."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {address_of(int(pid)): int(pid) for pid in pids}


def address_of(pid: int) -> str:
    flags = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    (address,) = [flag for flag in flags if flag.startswith("--worker-address=")]
    return address.partition("=")[2]


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_one_that_is_killed_comes_back_and_all_end_together(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its own children are those that are looked for, so none is forked by the tests' nursery.
    monkeypatch.delenv(nursery.ADDRESS_VARIABLE, raising=False)
    flags = ["--num-workers", "2", "--worker-address", f"unix:{socket_folder}/w", "--worker-group", "g"]
    service = Service("worker_service", [*flags, "--worker-device", "cpu", "--num-threads", "1"], socket_folder / "log")
    try:
        service.wait_for_log("all workers listen num_workers=2")
        addresses = [f"unix:{socket_folder}/w-{number}" for number in range(2)]
        before = [await info(address) for address in addresses]
        assert [(one.placement.group, one.placement.index) for one in before] == [("g", 0), ("g", 1)]
        pids = children_of(service.process.pid)
        assert set(pids) == set(addresses)
        os.kill(pids[addresses[1]], signal.SIGKILL)
        service.wait_for_log(r"(?s)starting it again service=worker-1 exit_code=-9.*listening")
        after = [await info(address) for address in addresses]
        assert after[0].incarnation == before[0].incarnation
        assert after[1].incarnation != before[1].incarnation
        pids = children_of(service.process.pid)
    finally:
        assert service.stop() == 0
    assert service.log.count("stopping") == 2
    assert not [pid for pid in pids.values() if is_running(pid)]
    assert "Traceback" not in service.log
