"""How a rank is reached, and how it makes sure of who the others are."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import GroupRequest
from blockyard.errors import BlockyardError, Reason
from tests.unit.worker_service.collectives.ranks import all_ranks, begun, gloo_groups
from worker_service.groups.joining import GroupSettings, Route, find_route, greet
from worker_service.groups.rendezvous import Rendezvous, RendezvousStore

CPU = torch.device("cpu")
REQUEST = GroupRequest(3, "unix:/nowhere", b"0123456789abcdef", ("a", "b"), 20.0)


def greetings(first: GroupRequest, second: GroupRequest) -> list[str]:
    """How it ends for each rank: empty if well."""
    groups = gloo_groups(2)
    requests = (first, second)

    def greet_as(rank: int) -> str:
        with groups[rank].lifetime.work(20.0):
            try:
                greet(groups[rank], Parallel(2, 1, rank), CPU, requests[rank], b"")
            except BlockyardError as error:
                assert error.reason is Reason.GROUP_BROKEN
                return error.message
        return ""

    return all_ranks(greet_as, range(2))


def test_ranks_that_were_told_the_same_know_each_other() -> None:
    assert greetings(REQUEST, replace(REQUEST, rendezvous_address="unix:/elsewhere", timeout_seconds=1.0)) == ["", ""]


@pytest.mark.parametrize("other", [{"secret": b"0123456789abcdeF"}, {"epoch": 4}, {"members": ("a", "c")}])
def test_a_peer_that_was_told_something_else_is_found_out(other: dict[str, object]) -> None:
    messages = greetings(REQUEST, replace(REQUEST, **other))  # type: ignore[arg-type]
    assert messages == [
        "the worker that answers as rank 1 does not know this group",
        "the worker that answers as rank 0 does not know this group",
    ]


@pytest.mark.parametrize(
    ("settings", "address", "host"),
    [
        (GroupSettings(), "unix:/w", "127.0.0.1"),
        (GroupSettings(), "127.0.0.1:50070", "127.0.0.1"),
        (GroupSettings(), "localhost:50070", "127.0.0.1"),
        (GroupSettings(host="127.0.0.2"), "127.0.0.1:50070", "127.0.0.2"),
        (GroupSettings(host="192.0.2.1", allow_insecure=True), "127.0.0.1:50070", "192.0.2.1"),
    ],
)
def test_a_rank_is_reached_where_it_reaches_the_first_unless_told_otherwise(
    settings: GroupSettings, address: str, host: str
) -> None:
    assert find_route(settings, CPU, address) == Route("gloo", host)


def test_there_is_no_way_to_a_name_that_nobody_has() -> None:
    with pytest.raises(BlockyardError, match="rank 0 cannot be reached") as raised:
        find_route(GroupSettings(), CPU, "nobody.invalid:1")
    assert raised.value.reason is Reason.GROUP_BROKEN


async def test_a_thread_that_waits_at_the_meeting_point_is_freed() -> None:
    store = RendezvousStore(Rendezvous(1), asyncio.get_running_loop(), 60.0)
    errors: list[BlockyardError] = []

    def wait() -> None:
        try:
            store.wait(["nobody tells this"])
        except BlockyardError as error:
            errors.append(error)

    waiting = begun(wait)
    store.close("a test")
    await asyncio.to_thread(waiting.join, 20)
    assert [error.message for error in errors] == ["a test"]


async def test_what_one_rank_sets_another_gets() -> None:
    point, loop = Rendezvous(1), asyncio.get_running_loop()
    first, second = (RendezvousStore(point, loop, 60.0) for _ in range(2))
    waiting = asyncio.create_task(asyncio.to_thread(second.get, "k"))
    await asyncio.to_thread(first.set, "k", "text")
    assert await waiting == b"text"


async def test_the_time_to_meet_is_limited() -> None:
    store = RendezvousStore(Rendezvous(1), asyncio.get_running_loop(), 0.01)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(store.get, "nobody tells this")
