"""Step streams of the ranks of a group, over real sockets: digests, quiet steps, and streams that end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard.common.v1 import status_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.kernels.backends import REFERENCE, Kernels
from tests.kit.kernels.ranks import new_backend
from tests.kit.processes.ranks import CACHE, Ranks
from tests.unit.worker_service.driver import StepDriver, WorkerDriver, fails, new_sequence, running_worker
from worker_service.models import loader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

FIRST = {"new_sequences": [new_sequence(1, [5, 6, 7], [1])], "sequence_ids": [1], "num_new_tokens": [3]}
NEXT = {"sequence_ids": [1], "num_new_tokens": [1]}


class Pair(Ranks):
    """Two ranks in this process, and their streams."""

    drivers: list[WorkerDriver]

    async def form(self, epoch: int, **fields: Any) -> list[Any]:
        """Forms a group, and has the ranks make their caches if they have none."""
        answers = await super().form(epoch, **fields)
        await self.make_caches()
        return answers

    def open(self, epoch: int) -> list[StepDriver]:
        return [driver.open(epoch) for driver in self.drivers]


@pytest.fixture
async def pair(socket_folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # In one process both would have one.
    kernels = Kernels(REFERENCE, torch.float32)
    monkeypatch.setattr(loader, "get_backend", lambda *_, **__: new_backend(kernels))
    async with AsyncExitStack() as stack:
        drivers: list[WorkerDriver] = []
        for rank in (0, 1):
            (socket_folder / str(rank)).mkdir()
            drivers.append(await stack.enter_async_context(running_worker(socket_folder / str(rank))))
        pair = Pair([driver.channel for driver in drivers], drivers[0].server.address)
        pair.drivers = drivers
        await pair.prepare(model, 2)
        yield pair


async def both(streams: list[StepDriver], **fields: Any) -> list[pb.ExecuteModelResponse]:
    """Sends a step to both ranks, and gives their answers."""
    return list(await asyncio.gather(*[stream.step(**fields) for stream in streams]))


async def test_both_ranks_answer_and_agree(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    for fields in (FIRST, NEXT, {**NEXT, "step_timeout": {"seconds": 20}}):
        first, second = await both(streams, **fields)
        assert (first.input_digest, first.output_digest) == (second.input_digest, second.output_digest)
        assert first.input_digest and first.output_digest
        assert (len(first.token_ids), len(second.token_ids)) == (1, 0)


async def test_a_quiet_step_has_one_answer(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    for stream in streams:
        await stream.send(**NEXT, quiet=True)
        await stream.send(**NEXT)
    assert [(await streams[0].answer()).step_id for _ in range(2)] == [2, 3]
    answer = await streams[1].answer()
    assert answer.step_id == 3
    assert answer.input_digest


async def test_steps_without_a_group_are_refused(pair: Pair) -> None:
    assert (await fails(pair.stubs[0].InitializeCache(CACHE))).reason is Reason.WRONG_STATE
    await pair.form(2)
    stream = pair.open(3)[0]
    assert "no group was formed for epoch 3" in (await stream.refused(**FIRST)).message


async def test_a_group_outlives_a_stream_that_ends_between_steps(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    for rank, stream in enumerate(streams):
        stream.call.cancel()
        await pair.wait_for(rank, lambda info: info.state == status_pb2.WORKER_STATE_CACHE_READY)
    assert all(info.group.reusable for info in await pair.infos())
    request = pb.FormGroupRequest(epoch=2, members=await pair.members(), reuse=True, timeout={"seconds": 20})
    assert all(
        isinstance(each, pb.FormGroupResponse) for each in await pair.each(lambda _, stub: stub.FormGroup(request))
    )
    await both(pair.open(2), **FIRST)


async def test_no_step_of_an_epoch_begins_once_the_next_is_prepared(pair: Pair) -> None:
    await pair.form(1)
    await both(pair.open(1), **FIRST)
    await pair.stubs[0].OpenRendezvous(pb.OpenRendezvousRequest(epoch=2, members=await pair.members()))
    group = pair.drivers[0].server.worker.membership.find(1)
    assert group is not None
    # As a step would that had left the queue before its stream was stopped.
    with pytest.raises(BlockyardError, match="the epoch of the group is over"), group.lifetime.work(1):
        pass


async def test_a_stream_that_ends_in_a_step_ends_the_group(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    # Rank 0 waits for rank 1, which never hears of this step.
    await streams[0].send(**NEXT, step_timeout={"seconds": 60})
    await pair.wait_for(0, lambda info: not info.group.reusable)
    streams[0].call.cancel()
    await pair.wait_for(0, lambda info: "in the middle of a step" in info.group.problem)
    # The next group of rank 1 closes the connections that rank 0 waits at.
    streams[1].call.cancel()
    assert all(isinstance(each, pb.FormGroupResponse) for each in await pair.form(2))
    await both(pair.open(2), **FIRST)


async def test_a_step_ends_with_its_time_where_a_rank_does_not_come(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    error = await streams[0].refused(**NEXT, step_timeout={"nanos": 100_000_000})
    assert error.reason is Reason.GROUP_BROKEN
    assert "Timed out" in error.message
    assert (await streams[1].refused(**NEXT)).reason is Reason.GROUP_BROKEN


async def test_a_rank_that_refuses_a_step_frees_the_other(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    await streams[0].send(**NEXT, step_timeout={"seconds": 60})
    assert (await streams[1].refused(sequence_ids=[7], num_new_tokens=[1])).reason is Reason.FIELD_INVALID
    answer = await streams[0].answer()
    assert answer.HasField("refusal")


async def test_a_group_of_a_later_epoch_ends_the_stream_before(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    assert all(isinstance(each, pb.FormGroupResponse) for each in await pair.form(2))
    for stream in streams:
        assert "epoch 2 took over" in (await stream.end_error()).message
    late = pair.open(1)[0]
    assert "epoch 1 is over" in (await late.refused(**FIRST)).message
    await both(pair.open(2), **FIRST)


async def test_a_rank_that_stops_frees_the_other(pair: Pair) -> None:
    await pair.form(1)
    streams = pair.open(1)
    await both(streams, **FIRST)
    await streams[0].send(**NEXT, step_timeout={"seconds": 60})
    await pair.drivers[1].server.worker.drain(5)
    assert (await streams[0].answer()).HasField("refusal")
