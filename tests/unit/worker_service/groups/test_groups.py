"""Groups of real workers over real sockets: formed, taken over, left, refused."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from blockyard.configuration import InternalSecuritySettings
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.security.identity import InternalIdentity
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from blockyard.worker.v1 import worker_pb2_grpc
from tests.kit.authority import Authority
from tests.kit.processes.ranks import Ranks
from tests.unit.worker_service.driver import WorkerDriver, fails, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

GLOO = pb.FormGroupResponse(kind=pb.COLLECTIVES_KIND_GLOO)


@asynccontextmanager
async def running_ranks(folder: Path, num_ranks: int, **settings: Any) -> AsyncIterator[Ranks]:
    """Workers on Unix sockets, in this process."""
    async with AsyncExitStack() as stack:
        drivers: list[WorkerDriver] = []
        for rank in range(num_ranks):
            home = folder / str(rank)
            home.mkdir()
            drivers.append(await stack.enter_async_context(running_worker(home, **settings)))
        yield Ranks([driver.channel for driver in drivers], drivers[0].server.address)


@pytest.fixture
async def pair(socket_folder: Path) -> AsyncIterator[Ranks]:
    """Two ranks, set up."""
    async with running_ranks(socket_folder, 2) as ranks:
        await ranks.init(2)
        yield ranks


def error_of(answer: object) -> BlockyardError:
    """The error that a rank answered."""
    assert isinstance(answer, grpc.aio.AioRpcError), answer
    return from_rpc_error(answer)


async def test_a_group_is_formed_and_told(pair: Ranks) -> None:
    assert not (await pair.infos())[0].HasField("group")
    assert await pair.form(3) == [GLOO, GLOO]
    digest = hashlib.sha256("".join(f"{member}\n" for member in await pair.members()).encode()).digest()
    for info in await pair.infos():
        assert info.group == pb.GroupInfo(epoch=3, reusable=True, members_digest=digest)
        assert info.epoch == 3


async def test_stages_form_a_group(socket_folder: Path) -> None:
    async with running_ranks(socket_folder, 4) as ranks:
        await ranks.init(2, 2)
        assert await ranks.form(1) == [GLOO] * 4


async def test_a_group_ends_the_one_before(pair: Ranks) -> None:
    for epoch in (1, 2, 2, 5):
        assert await pair.form(epoch) == [GLOO, GLOO]
    assert [info.group.epoch for info in await pair.infos()] == [5, 5]


async def test_a_whole_group_is_taken_over_into_the_next_epoch(pair: Ranks) -> None:
    await pair.form(1)
    members = await pair.members()
    request = pb.FormGroupRequest(epoch=2, members=members, reuse=True)
    request.timeout.FromSeconds(20)
    assert await pair.each(lambda rank, stub: stub.FormGroup(request)) == [GLOO, GLOO]
    assert [(info.group.epoch, info.group.reusable) for info in await pair.infos()] == [(2, True)] * 2
    await pair.leave(2)
    request.epoch = 3
    errors = [error_of(each) for each in await pair.each(lambda rank, stub: stub.FormGroup(request))]
    assert {error.reason for error in errors} == {Reason.WRONG_STATE}


async def test_a_rank_that_started_again_is_refused(pair: Ranks) -> None:
    members = await pair.members()
    before = [members[0], "another"]
    first, second = await pair.form(1, members=before, timeout={"nanos": 300_000_000})
    assert "rank 1 did not join" in error_of(first).message
    assert error_of(first).metadata["peer"] == "1"
    assert error_of(second).reason is Reason.WRONG_STATE
    assert "was restarted" in error_of(second).message
    request = pb.OpenRendezvousRequest(epoch=1, members=["another", members[1]])
    assert (await fails(pair.stubs[0].OpenRendezvous(request))).reason is Reason.WRONG_STATE


async def test_leaving_frees_the_ranks_that_wait_for_another(pair: Ranks) -> None:
    request = await pair.request(1, timeout={"seconds": 60})
    waiting = asyncio.ensure_future(pair.stubs[0].FormGroup(request))
    await pair.wait_for(0, lambda info: info.HasField("group"))
    await pair.leave(1, "rank 1 is gone")
    assert (await fails(waiting)).message == "rank 1 is gone"
    group = (await pair.infos())[0].group
    assert (group.reusable, group.problem) == (False, "rank 1 is gone")
    assert await pair.form(2) == [GLOO, GLOO]


async def test_leaving_is_idempotent_and_keeps_a_later_group(pair: Ranks) -> None:
    await pair.leave(7)
    await pair.form(2)
    await pair.leave(1)
    assert all(info.group.reusable for info in await pair.infos())
    await pair.leave(2, "first")
    await pair.leave(2, "second")
    assert {info.group.problem for info in await pair.infos()} == {"first"}
    await pair.form(3)
    await pair.leave(3, "x" * 10**6)
    assert all(len(info.group.problem) <= 1000 for info in await pair.infos())


async def test_a_caller_that_leaves_ends_what_it_began(pair: Ranks) -> None:
    request = await pair.request(1, timeout={"seconds": 60})
    call = pair.stubs[1].FormGroup(request)
    await pair.wait_for(1, lambda info: info.HasField("group"))
    call.cancel()
    await pair.wait_for(1, lambda info: info.group.problem)
    assert await pair.form(2) == [GLOO, GLOO]


async def test_a_rank_that_leaves_is_noticed_by_the_next_use(pair: Ranks) -> None:
    await pair.form(1)
    await pair.stubs[1].LeaveGroup(pb.LeaveGroupRequest(epoch=1, reason="a test"))
    request = pb.FormGroupRequest(epoch=2, members=await pair.members(), reuse=True)
    request.timeout.FromSeconds(20)
    assert error_of((await pair.each(lambda rank, stub: stub.FormGroup(request)))[0]).reason is Reason.GROUP_BROKEN
    assert await pair.form(3) == [GLOO, GLOO]


async def test_ranks_that_are_set_up_otherwise_form_no_group(socket_folder: Path) -> None:
    async with running_ranks(socket_folder, 2) as ranks:
        for stub, sizes in zip(ranks.stubs, ((2, 1, 0), (1, 2, 1)), strict=True):
            parallel = pb.Parallel(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], rank=sizes[2])
            await stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, parallel=parallel))
        for answer in await ranks.form(1):
            assert "is set up for gloo, " in error_of(answer).message


async def test_only_who_was_told_the_secret_speaks_at_the_meeting_point(pair: Ranks) -> None:
    request = await pair.request(4)
    stub = pair.stubs[0]
    good = {"epoch": 4, "secret": request.secret, "key": "k"}
    await stub.SetRendezvousKey(pb.SetRendezvousKeyRequest(**good, value=b"v"))
    assert (await stub.GetRendezvousKey(pb.GetRendezvousKeyRequest(**good))).value == b"v"
    for wrong in ({"epoch": 3}, {"secret": b"0" * 16}, {"secret": b""}):
        denied = await fails(stub.GetRendezvousKey(pb.GetRendezvousKeyRequest(**good | wrong)))
        assert denied.reason is Reason.PERMISSION_DENIED
        denied = await fails(stub.SetRendezvousKey(pb.SetRendezvousKeyRequest(**good | {"key": "n"} | wrong)))
        assert denied.reason is Reason.PERMISSION_DENIED
    refused = [
        await fails(stub.SetRendezvousKey(pb.SetRendezvousKeyRequest(**good | wrong)))
        for wrong in ({}, {"key": ""}, {"key": "k" * 300}, {"key": "n", "value": b"0" * 70000})
    ]
    assert {error.reason for error in refused} == {Reason.FIELD_INVALID}
    assert "is set already" in refused[0].message


async def test_the_meeting_point_closes_when_the_ranks_have_met(pair: Ranks) -> None:
    request = await pair.request(1)
    await pair.each(lambda rank, stub: stub.FormGroup(request))
    key = pb.GetRendezvousKeyRequest(epoch=1, secret=request.secret, key="set-up 0")
    assert (await fails(pair.stubs[0].GetRendezvousKey(key))).reason is Reason.GROUP_BROKEN


async def test_who_waits_at_a_meeting_point_that_closes_is_sent_away(pair: Ranks) -> None:
    request = await pair.request(1)
    key = pb.GetRendezvousKeyRequest(epoch=1, secret=request.secret, key="k")
    waiting = asyncio.ensure_future(pair.stubs[0].GetRendezvousKey(key))
    # Sent behind it on the same connection.
    await pair.infos()
    await pair.leave(1, "a test")
    assert (await fails(waiting)).message == "a test"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"epoch": 0}, "epoch"),
        ({"members": ["a"]}, "members"),
        ({"members": ["a", "a"]}, "members"),
        ({"members": ["a", ""]}, "members"),
        ({"members": ["a", "b" * 300]}, "members"),
        ({"timeout": {}}, "timeout"),
        ({"timeout": {"seconds": 3601}}, "timeout"),
        ({"timeout": {"seconds": -1}}, "timeout"),
        ({"secret": b"short"}, "secret"),
        ({"rendezvous_address": ""}, "rendezvous_address"),
    ],
)
async def test_a_request_that_cannot_be_meant_is_refused(pair: Ranks, fields: dict[str, Any], field: str) -> None:
    good = {"epoch": 1, "members": await pair.members(), "timeout": {"seconds": 1}, "secret": b"0" * 16}
    request = pb.FormGroupRequest(**{**good, "rendezvous_address": "unix:/nowhere", **fields})
    error = await fails(pair.stubs[0].FormGroup(request))
    assert error.reason is Reason.FIELD_INVALID
    assert [violation.field for violation in error.violations] == [field]


async def test_ranks_meet_at_rank_0_and_epochs_only_grow(pair: Ranks) -> None:
    members = await pair.members()
    elsewhere = await fails(pair.stubs[1].OpenRendezvous(pb.OpenRendezvousRequest(epoch=1, members=members)))
    assert "rank 0" in elsewhere.message
    await pair.form(5)
    for epoch in (4, 2**40):
        error = await fails(pair.stubs[0].OpenRendezvous(pb.OpenRendezvousRequest(epoch=epoch, members=members)))
        assert error.reason is Reason.WRONG_STATE
    assert all(info.group.reusable for info in await pair.infos()), "a refused call ended the group"


async def test_a_world_of_one_has_no_group_nor_a_worker_without_a_device(socket_folder: Path) -> None:
    async with running_ranks(socket_folder, 1) as ranks:
        (member,) = await ranks.members()
        request = pb.OpenRendezvousRequest(epoch=1, members=[member])
        assert (await fails(ranks.stubs[0].OpenRendezvous(request))).reason is Reason.WRONG_STATE
        await ranks.init(1)
        assert "world size of 1" in (await fails(ranks.stubs[0].OpenRendezvous(request))).message
        await ranks.leave(1)


@pytest.mark.parametrize(
    ("sizes", "field"), [((3, 1, 0), "tensor"), ((16, 1, 0), "tensor"), ((2, 0, 0), "pipeline"), ((2, 2, 4), "rank")]
)
async def test_sizes_that_no_model_allows_are_refused(
    fresh_worker: WorkerDriver, sizes: tuple[int, int, int], field: str
) -> None:
    parallel = pb.Parallel(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], rank=sizes[2])
    error = await fails(fresh_worker.stub.InitDevice(pb.InitDeviceRequest(parallel=parallel)))
    assert any(field in violation.field for violation in error.violations)


async def test_a_model_is_not_loaded_at_sizes_that_it_does_not_allow(fresh_worker: WorkerDriver, model: Path) -> None:
    parallel = pb.Parallel(tensor_parallel_size=8, pipeline_parallel_size=1)
    await fresh_worker.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, parallel=parallel))
    call = fresh_worker.stub.LoadModel(pb.LoadModelRequest(model=str(model)))
    error = await fails(call.read())
    assert error.reason is Reason.MODEL_NOT_LOADED
    assert "1 or 2 or 4" in error.message


async def test_ranks_do_not_talk_in_the_clear_beyond_this_machine_unless_told_to(socket_folder: Path) -> None:
    async with running_ranks(socket_folder, 2, worker_group_host="192.0.2.1") as ranks:
        await ranks.init(2)
        for answer in await ranks.form(1, timeout={"seconds": 5}):
            assert error_of(answer).reason is Reason.FEATURE_DISABLED
            assert "--allow-insecure-group" in error_of(answer).message


async def test_ranks_meet_by_their_certificates(socket_folder: Path) -> None:
    authority = Authority(socket_folder)
    settings = {
        service: InternalSecuritySettings(
            **authority.issue(service, names=[f"{service}.blockyard"]).settings("internal"),
            internal_authority=str(authority.certificate),
        )
        for service in ("worker", "scheduler")
    }
    scheduler = InternalIdentity(settings["scheduler"]).peer("worker")
    secured = {"internal": settings["worker"], "peer": scheduler, "worker_address": "127.0.0.1:0"}
    async with running_ranks(socket_folder, 2, **secured) as ranks:
        await ranks.init(2)
        assert await ranks.form(1) == [GLOO, GLOO]
        request = await ranks.request(2)
        key = pb.GetRendezvousKeyRequest(epoch=2, secret=request.secret, key="k")
        assert "only worker.blockyard may" in (await fails(ranks.stubs[0].GetRendezvousKey(key))).message
        worker = InternalIdentity(settings["worker"]).peer("worker")
        async with internal_channel(ranks.address, worker) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.SetRendezvousKey(pb.SetRendezvousKeyRequest(epoch=2, secret=request.secret, key="k"))
            assert (await stub.GetRendezvousKey(key)).value == b""
            error = await fails(stub.GetWorkerInfo(pb.GetWorkerInfoRequest()))
            assert "only scheduler.blockyard may" in error.message


async def test_nccl_needs_gpus(socket_folder: Path) -> None:
    async with running_ranks(socket_folder, 2, collectives="nccl") as ranks:
        await ranks.init(2)
        assert {error_of(answer).reason for answer in await ranks.form(1)} == {Reason.FEATURE_DISABLED}


async def test_the_placement_is_what_the_process_was_started_with(socket_folder: Path) -> None:
    async with running_worker(socket_folder, worker_group="a", worker_index=3) as worker:
        placement = (await worker.info()).placement
        assert (placement.group, placement.index, bool(placement.node)) == ("a", 3, True)
