"""A replica of several fake workers: what each is told, what has to be equal, and when they become a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.common.v1 import status_pb2
from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import CacheInfo, WorkerState
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.replicas.epoch_failure import Unusable
from scheduler_service.replicas.rank import configuration_digest
from scheduler_service.replicas.replica import Replica
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from scheduler_service.replicas.worker_link import WorkerLink
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions
from tests.kit.waiting import until

if TYPE_CHECKING:
    from blockyard.contract.scheduling import ModelFacts, Readiness

Settings = Callable[..., SchedulerConfiguration]
LIMITS = AnswerLimits(100, 4096, 256)


class Group:
    """The workers of one replica, and the replica."""

    def __init__(self, configuration: SchedulerConfiguration, stack: AsyncExitStack, num_workers: int) -> None:
        self.messages: list[str] = []
        self._stack = stack
        address = configuration.service.worker_address
        self.addresses = [f"{address}-{rank}" for rank in range(num_workers)]
        self.workers: list[FakeWorker] = []
        self.replica = Replica([WorkerLink(each) for each in self.addresses], configuration, self._report)

    def _report(self, readiness: Readiness) -> None:
        self.messages.append(readiness.message)

    async def start(self, kind: type[FakeWorker] = FakeWorker, rank: int | None = None, **options: Any) -> FakeWorker:
        """Starts the next worker, or that of a rank anew."""
        address = self.addresses[len(self.workers) if rank is None else rank]
        worker = await self._stack.enter_async_context(kind(FakeWorkerOptions(**options), address))
        if rank is None:
            self.workers.append(worker)
        else:
            self.workers[rank] = worker
        return worker

    async def set_up(self) -> tuple[ModelFacts, CacheInfo]:
        return await asyncio.wait_for(self.replica.set_up(), 20)

    async def open(self) -> int:
        """Sets up and opens an epoch, as the engine does; returns its number."""
        await self.set_up()
        steps = self.replica.open_steps(LIMITS, lambda: 10.0)
        await until(lambda: all(worker.state == status_pb2.WORKER_STATE_RUNNING for worker in self.workers))
        steps.cancel()
        return steps.epoch

    def told(self, part: str) -> bool:
        return any(part in message for message in self.messages)


@asynccontextmanager
async def group_of(configuration: SchedulerConfiguration, num_workers: int = 2) -> AsyncIterator[Group]:
    parallel = replace(configuration.parallel, tensor_parallel_size=num_workers)
    async with AsyncExitStack() as stack:
        group = Group(replace(configuration, parallel=parallel), stack, num_workers)
        stack.push_async_callback(group.replica.close)
        yield group


async def test_each_rank_is_told_its_place_and_all_the_same_pools(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration, 4) as group:
        for num_device_blocks, num_host_blocks in ((1000, 50), (900, 60), (1100, 40), (1000, 50)):
            await group.start(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks)
        facts, cache = await group.set_up()
        assert [worker.parallel for worker in group.workers] == [
            worker_pb2.Parallel(tensor_parallel_size=4, pipeline_parallel_size=1, rank=rank) for rank in range(4)
        ]
        assert len({worker.configuration_digest for worker in group.workers}) == 4
        assert (cache.num_device_blocks, cache.num_host_blocks) == (900, 40)
        assert all(worker.plans == [group.workers[0].plans[0]] for worker in group.workers)
        assert facts.determinism_id == "hash"
        assert [worker.num_formed for worker in group.workers] == [1] * 4
        assert [rank.state for rank in group.replica.ranks] == [WorkerState.CACHE_READY] * 4
        assert group.replica.address == "+".join(group.addresses)


def test_a_rank_has_a_digest_of_its_own_and_a_world_of_one_too(settings: Settings) -> None:
    places = [Parallel(), Parallel(2, 1, 0), Parallel(2, 1, 1), Parallel(4, 1, 0), Parallel(1, 2, 0), Parallel(1, 2, 1)]
    assert len({configuration_digest(settings(), place) for place in places}) == len(places)


async def test_the_group_is_formed_before_blocks_are_counted(configuration: SchedulerConfiguration) -> None:
    class Counting(FakeWorker):
        async def DetermineNumAvailableBlocks(self, request: Any, context: Any) -> Any:
            assert self.group is not None
            assert self.group.reusable
            return await super().DetermineNumAvailableBlocks(request, context)

    async with group_of(configuration) as group:
        await group.start(Counting)
        await group.start(Counting)
        await group.set_up()


class Loading(FakeWorker):
    """Loads as far as a test says; `num_asked`: how often it was asked to."""

    def __init__(self, options: FakeWorkerOptions, address: str) -> None:
        super().__init__(options, address)
        self.done: asyncio.Queue[int] = asyncio.Queue()
        self.num_asked = 0

    async def LoadModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_asked += 1
        while (done := await self.done.get()) < 100:
            yield worker_pb2.LoadModelResponse(progress=worker_pb2.LoadProgress(done_bytes=done, total_bytes=100))
        async for event in super().LoadModel(request, context):
            yield event


async def test_the_least_progress_is_told(
    configuration: SchedulerConfiguration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.replicas.rank.PROGRESS_SECONDS", 0.0)
    async with group_of(configuration) as group:
        workers = [await group.start(Loading) for _ in range(2)]
        setting_up = asyncio.create_task(group.set_up())
        for worker, done in ((0, 60), (1, 20), (1, 70)):
            num_told = len(group.messages)
            workers[worker].done.put_nowait(done)
            await until(lambda: len(group.messages) > num_told)  # noqa: B023
        shares = [message.rpartition(" ")[2] for message in group.messages if "workers are loading" in message]
        assert shares[:3] == ["0%", "20%", "60%"]
        for worker in workers:
            worker.done.put_nowait(100)
        await setting_up


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"weights_digest": "other"}, "differ in weights_digest: hash and other"),
        ({"determinism_id": "other"}, "differ in determinism_id: hash and other"),
        ({"batch_invariant": False}, "differ in batch_invariant: True and False"),
        ({"vocab_size": 99}, "differ in vocab_size: 100 and 99"),
        ({"block_size": 32}, "blocks of 16, 32 tokens: choose one size with --block-size"),
    ],
)
async def test_what_has_to_be_equal(settings: Settings, options: dict[str, Any], named: str) -> None:
    configuration = settings(wait_for_repair=False)
    async with group_of(configuration) as group:
        await group.start()
        await group.start(**options)
        with pytest.raises(Unusable, match=named):
            await group.set_up()


async def test_ranks_that_differ_are_not_set_up_again_until_one_is_another_process(
    configuration: SchedulerConfiguration,
) -> None:
    async with group_of(configuration) as group:
        await group.start()
        wrong = await group.start(weights_digest="other")
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: group.told("differ in weights_digest"))
        num_infos = wrong.num_infos
        await until(lambda: wrong.num_infos > num_infos + 1)
        assert wrong.num_formed == 0
        await wrong.kill()
        await group.start(rank=1)
        await setting_up
        assert [worker.num_loads for worker in group.workers] == [1, 1]


# Epochs and groups.


async def test_a_group_that_is_whole_and_idle_goes_on(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start()
        assert [await group.open() for _ in range(3)] == [1, 2, 3]
        assert [(worker.num_formed, worker.num_reused) for worker in group.workers] == [(1, 2)] * 2
        assert [worker.group.epoch for worker in group.workers if worker.group] == [3, 3]


async def test_a_group_that_one_rank_lost_is_formed_anew_and_nobody_loads_again(
    configuration: SchedulerConfiguration,
) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start()
        group.workers[1].epoch = 40
        assert await group.open() == 41
        group.workers[1].break_group("a peer is gone")
        assert await group.open() == 42
        assert [(worker.num_formed, worker.num_loads, len(worker.plans)) for worker in group.workers] == [(2, 1, 1)] * 2


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_was_started_again_gets_the_pools_of_the_others(
    configuration: SchedulerConfiguration, rank: int
) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start(num_device_blocks=800)
        assert await group.open() == 1
        await group.workers[rank].kill()
        await group.start(rank=rank, num_device_blocks=1000)
        assert await group.open() == 2
        other, successor = group.workers[1 - rank], group.workers[rank]
        assert (other.num_loads, other.num_profiles, other.num_formed) == (1, 1, 2)
        assert successor.plans == other.plans


async def test_a_rank_with_too_little_memory_says_by_how_much(settings: Settings) -> None:
    async with group_of(settings()) as group:
        for _ in range(2):
            await group.start(num_device_blocks=1000)
        assert await group.open() == 1
        await group.workers[1].kill()
        small = await group.start(rank=1, num_device_blocks=900)
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: group.told("900 device blocks fit, 100 fewer than the other ranks have"))
        assert small.plans == []
        await small.kill()
        # What is measured differs a little each time.
        await group.start(rank=1, num_device_blocks=990)
        await setting_up


async def test_pools_that_differ_end_the_rank_that_has_them(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start()
        await group.set_up()
        assert group.workers[1].cache is not None
        group.workers[1].cache.num_device_blocks -= 1
        setting_up = asyncio.create_task(group.set_up())
        await asyncio.wait_for(group.workers[1].stopping.wait(), 10)
        await group.workers[1].kill()
        await group.start(rank=1)
        await setting_up
        assert not group.workers[0].stopping.is_set()


@pytest.mark.parametrize("reason", [Reason.GROUP_BROKEN, Reason.WRONG_STATE])
async def test_a_rank_that_cannot_join_makes_all_leave_and_it_is_tried_again(
    settings: Settings, reason: Reason
) -> None:
    async with group_of(settings(wait_for_repair=False)) as group:
        for _ in range(2):
            await group.start()
        group.workers[1].refuse_group = BlockyardError(reason, "cannot meet")
        await group.set_up()
        assert group.told("cannot meet")
        assert [worker.num_formed for worker in group.workers] == [1, 1]
        assert [worker.num_loads for worker in group.workers] == [1, 1]


async def test_a_group_that_is_given_up_is_left_by_all(configuration: SchedulerConfiguration) -> None:
    class Failing(FakeWorker):
        num_failures = 1

        async def InitializeCache(self, request: Any, context: Any) -> Any:
            if self.num_failures:
                self.num_failures -= 1
                raise BlockyardError(Reason.GROUP_BROKEN, "no answer of a peer")
            return await super().InitializeCache(request, context)

    async with group_of(configuration) as group:
        await group.start()
        await group.start(Failing)
        await group.set_up()
        assert [worker.num_left for worker in group.workers] == [1, 1]
        assert [worker.num_formed for worker in group.workers] == [2, 2]
        assert [len(worker.plans) for worker in group.workers] == [1, 1]


# One rank in trouble.


async def test_a_rank_loads_before_the_others_are_there(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        first = await group.start(Loading)
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: first.num_asked == 1)
        await group.start()
        first.done.put_nowait(100)
        await setting_up
        assert first.num_asked == 1


class Stopping(FakeWorker):
    """Stops at one call, for ever; `stopped` is set there."""

    rpc = ""

    def __init__(self, options: FakeWorkerOptions, address: str) -> None:
        super().__init__(options, address)
        self.stopped = asyncio.Event()

    async def _reach(self, rpc: str) -> None:
        if self.rpc == rpc:
            self.stopped.set()
            await asyncio.Event().wait()

    async def InitDevice(self, request: Any, context: Any) -> Any:
        await self._reach("InitDevice")
        return await super().InitDevice(request, context)

    async def LoadModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self._reach("LoadModel")
        async for event in super().LoadModel(request, context):
            yield event

    async def OpenRendezvous(self, request: Any, context: Any) -> Any:
        await self._reach("OpenRendezvous")
        return await super().OpenRendezvous(request, context)

    async def FormGroup(self, request: Any, context: Any) -> Any:
        await self._reach("FormGroup")
        return await super().FormGroup(request, context)

    async def DetermineNumAvailableBlocks(self, request: Any, context: Any) -> Any:
        await self._reach("DetermineNumAvailableBlocks")
        return await super().DetermineNumAvailableBlocks(request, context)

    async def InitializeCache(self, request: Any, context: Any) -> Any:
        await self._reach("InitializeCache")
        return await super().InitializeCache(request, context)


SET_UP = ("InitDevice", "LoadModel", "OpenRendezvous", "FormGroup", "DetermineNumAvailableBlocks", "InitializeCache")


@pytest.mark.parametrize(
    ("rpc", "rank"), [(rpc, rank) for rpc in SET_UP for rank in (0, 1) if (rpc, rank) != ("OpenRendezvous", 1)]
)
async def test_a_rank_that_dies_at_any_call_is_set_up_anew_and_the_other_is_not(
    settings: Settings, rpc: str, rank: int
) -> None:
    # A death needs no repair, also where nobody would wait for one.
    async with group_of(settings(wait_for_repair=False)) as group:
        for number in range(2):
            worker = await group.start(Stopping)
            assert isinstance(worker, Stopping)
            worker.rpc = rpc if number == rank else ""
        setting_up = asyncio.create_task(group.set_up())
        dying = group.workers[rank]
        assert isinstance(dying, Stopping)
        await asyncio.wait_for(dying.stopped.wait(), 10)
        await dying.kill()
        await group.start(rank=rank)
        await setting_up
        other = group.workers[1 - rank]
        assert (other.num_loads, len(other.plans)) == (1, 1)
        assert [rank.state for rank in group.replica.ranks] == [WorkerState.CACHE_READY] * 2


async def test_a_rank_that_hangs_while_the_group_is_formed_is_no_reason_to_give_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.replicas.replica.FORM_GROUP_SECONDS", 0.05)
    monkeypatch.setattr("scheduler_service.replicas.worker_link.INFO_SECONDS", 0.2)
    async with group_of(settings(wait_for_repair=False)) as group:
        await group.start()
        hanging = await group.start(Stopping)
        assert isinstance(hanging, Stopping)
        hanging.rpc = "FormGroup"
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: len(group.messages) > 1)
        hanging.rpc = ""
        await setting_up
        assert [worker.num_loads for worker in group.workers] == [1, 1]


async def test_a_rank_goes_on_loading_while_another_is_started_again(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        slow, other = await group.start(Loading), await group.start(Loading)
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: slow.state == other.state == status_pb2.WORKER_STATE_DEVICE_READY)
        slow.done.put_nowait(10)
        await until(lambda: slow.done.empty())
        await other.kill()
        await until(lambda: group.told("no worker answers"))
        await group.start(rank=1)
        await until(lambda: group.workers[1].num_loads == 1)
        slow.done.put_nowait(100)
        await setting_up
        assert slow.num_asked == 1
        assert [worker.num_loads for worker in group.workers] == [1, 1]


async def test_a_set_up_that_is_cancelled_loads_no_more(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        workers = [await group.start(Loading) for _ in range(2)]
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: all(worker.state == status_pb2.WORKER_STATE_DEVICE_READY for worker in workers))
        setting_up.cancel()
        await asyncio.wait({setting_up})
        assert all(rank._loading is None for rank in group.replica.ranks)


async def test_two_ranks_are_two_processes(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start()
        group.workers[1].incarnation = group.workers[0].incarnation
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: group.told("two addresses lead to one worker"))
        group.workers[1].incarnation = "another"
        await setting_up


async def test_a_rank_that_drains_is_waited_for_by_name(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start()
        group.workers[1].drain()
        setting_up = asyncio.create_task(group.set_up())
        await until(lambda: group.told(f"the worker of rank 1 at {group.addresses[1]} is stopping"))
        await group.workers[1].kill()
        await group.start(rank=1)
        await setting_up


async def test_a_worker_of_another_rank_is_ended(configuration: SchedulerConfiguration) -> None:
    async with group_of(configuration) as group:
        for _ in range(2):
            await group.start()
        await group.set_up()
        group.workers[1].configuration_digest = group.workers[0].configuration_digest
        setting_up = asyncio.create_task(group.set_up())
        await asyncio.wait_for(group.workers[1].stopping.wait(), 10)
        setting_up.cancel()
        await asyncio.wait({setting_up})
        assert not group.workers[0].stopping.is_set()
