"""How groups end: by a peer's end, by time, by abort; and that whoever waits is free then."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from blockyard.contract.parallel import Parallel
from blockyard.errors import BlockyardError, Reason
from tests.kit.waiting import wait_until
from tests.unit.worker_service.collectives.ranks import all_ranks, begun, gloo_groups, make_collectives
from worker_service.collectives.group import MAX_QUEUED_SENDS, GroupLifetime
from worker_service.collectives.nccl import abort_nccl, find_interface, join_nccl

if TYPE_CHECKING:
    from worker_service.collectives.group import RankGroup

SECONDS = 20.0


def error_of(collectives: Any, rows: torch.Tensor | None = None) -> BlockyardError:
    """The error that an operation ends with."""
    with pytest.raises(BlockyardError) as raised:
        collectives.add(torch.ones(1, 1) if rows is None else rows)
    return raised.value


@pytest.mark.parametrize("transport", ["threads", "gloo"])
def test_an_abort_frees_the_peers_that_wait(transport: str) -> None:
    ranks = make_collectives(transport, 4)
    errors: queue.SimpleQueue[BlockyardError] = queue.SimpleQueue()
    waiting = [begun(lambda rank=rank: errors.put(error_of(rank))) for rank in ranks[1:]]
    ranks[0].abort("a test")
    for thread in waiting:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert {errors.get().reason for _ in waiting} == {Reason.GROUP_BROKEN}
    assert all(rank.is_broken for rank in ranks)
    assert error_of(ranks[0]).message == "a test"


def test_no_operation_begins_in_a_group_that_has_ended() -> None:
    first, _ = make_collectives("gloo", 2)
    first.abort("a test")
    first.abort("another reason")
    for operation in (lambda: first.add(torch.ones(1, 1)), lambda: first.send(torch.ones(1), 1)):
        with pytest.raises(BlockyardError, match="a test") as raised:
            operation()
        assert raised.value.metadata == {"rank": "0"}


def test_an_operation_ends_with_the_time_of_its_step() -> None:
    first, second = gloo_groups(2)
    with first.lifetime.work(0.05):
        assert "Timed out" in error_of(first.world).message
        assert first.lifetime.seconds_left < SECONDS
    # gloo closes the connection then, which frees the peer.
    assert error_of(second.world).reason is Reason.GROUP_BROKEN


def test_an_operation_that_begins_too_late_ends_at_once() -> None:
    first, _ = gloo_groups(2)
    with first.lifetime.work(-1.0):
        assert error_of(first.world).reason is Reason.GROUP_BROKEN


def test_an_abort_during_an_operation_ends_the_group_behind_it() -> None:
    first, second = gloo_groups(2)
    errors: queue.SimpleQueue[BlockyardError] = queue.SimpleQueue()
    thread = begun(lambda: errors.put(error_of(first.world)))
    wait_until(lambda: first.lifetime.is_in_operation)
    first.lifetime.abort("a test")
    # gloo cannot be interrupted: the operation ends, and its result does not count.
    second.world.add(torch.ones(1, 1))
    thread.join(SECONDS)
    assert errors.get().message == "a test"
    assert error_of(second.world).reason is Reason.GROUP_BROKEN


def test_a_stage_goes_on_before_its_rows_are_received() -> None:
    first, second = gloo_groups(1, 2)
    sent = torch.arange(5.0).view(1, 5)
    for number in range(MAX_QUEUED_SENDS):
        first.send(sent + number)
    sent.zero_()
    received = torch.empty(1, 5)
    for number in range(MAX_QUEUED_SENDS):
        second.receive(received)
        assert received.tolist() == [[number + place for place in range(5)]]


def test_rows_that_nobody_receives_hold_up_neither_the_group_nor_its_end() -> None:
    first, second = gloo_groups(1, 2)
    for _ in range(MAX_QUEUED_SENDS):
        first.send(torch.ones(1, 1 << 20))
    with first.lifetime.work(0.05), pytest.raises(BlockyardError, match="Timed out"):
        first.send(torch.ones(1, 1))
    with pytest.raises(BlockyardError):
        second.receive(torch.ones(1, 1))


def test_a_group_with_rows_on_their_way_is_of_no_use_in_another_epoch() -> None:
    first, second = gloo_groups(1, 2)
    assert first.lifetime.is_idle
    with first.lifetime.work(SECONDS):
        first.send(torch.ones(1, 1))
    # The step that would take them may be dropped there, and the next epoch would take them for its own.
    assert not first.lifetime.is_idle
    assert not first.lifetime.suspend()
    assert second.lifetime.is_idle


def test_it_is_known_how_long_a_stage_waits() -> None:
    first, second = gloo_groups(1, 2)
    with second.lifetime.work(SECONDS):
        thread = begun(lambda: second.receive(torch.empty(1, 1)))
        wait_until(lambda: second.lifetime.is_in_operation)
        first.send(torch.ones(1, 1))
        thread.join(SECONDS)
        assert second.lifetime.waited_seconds > 0
    with second.lifetime.work(SECONDS):
        assert second.lifetime.waited_seconds == 0


def test_work_does_not_begin_in_a_group_whose_epoch_is_over() -> None:
    first, _ = gloo_groups(2)
    with first.lifetime.work(SECONDS):
        assert not first.lifetime.suspend(), "work runs"
    assert first.lifetime.suspend()
    with pytest.raises(BlockyardError, match="epoch"), first.lifetime.work(SECONDS):
        pass
    first.lifetime.resume()
    with first.lifetime.work(SECONDS):
        pass


def test_a_process_group_that_comes_after_the_end_is_dropped() -> None:
    lifetime = GroupLifetime(0)
    lifetime.abort("a test")

    class Anything:
        def __del__(self) -> None:
            dropped.set()

    dropped = threading.Event()
    lifetime.own(Anything())
    assert dropped.is_set()


class AbortableGroup:
    """A process group as NCCL's: queued operations, which an abort ends without a word and with part of the data."""

    def __init__(self, store: c10d.Store, rank: int, size: int) -> None:
        self._group = c10d.ProcessGroupGloo(store, rank, size)
        self.aborted = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort(self) -> None:
        self.aborted.set()


class HangingGroup(AbortableGroup):
    """One of which a sum never ends by itself."""

    def _allgather_base(self, gathered: torch.Tensor, mine: torch.Tensor, options: object) -> HangingGroup:
        del mine, options
        gathered[:1] = 7.0
        return self

    def wait(self) -> None:
        self.aborted.wait(SECONDS)


def nccl_groups(make: Any) -> list[RankGroup]:
    store = c10d.HashStore()

    def join(rank: int) -> RankGroup:
        lifetime = GroupLifetime(rank, abort_nccl)
        return join_nccl(store, Parallel(2, 1, rank), lifetime, torch.device("cpu"), make)

    return all_ranks(join, range(2))


def test_a_group_of_nccl_adds_as_others_do() -> None:
    def add(group: RankGroup) -> float:
        rows = torch.tensor([[float(group.world.rank + 1)]])
        group.world.add(rows)
        return rows.item()

    assert all_ranks(add, nccl_groups(AbortableGroup)) == [3.0, 3.0]


def test_an_aborted_operation_of_nccl_is_not_believed() -> None:
    first, _ = nccl_groups(HangingGroup)
    errors: queue.SimpleQueue[BlockyardError] = queue.SimpleQueue()
    thread = begun(lambda: errors.put(error_of(first.world)))
    wait_until(lambda: first.lifetime.is_in_operation)
    first.world.abort("a test")
    thread.join(SECONDS)
    assert errors.get().message == "a test"


def test_the_interface_of_an_address_is_found() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert not find_interface("203.0.113.1")
    assert not find_interface("a-name")
