"""Which replicas there are: targets as they are given, names as they are looked up, and workers that make groups."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard.configuration import ParallelSettings
from blockyard.contract.workers import Placement
from blockyard.settings import SettingsError
from scheduler_service.replicas.fleet import Fleet, make_groups
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

Names = dict[str, list[str]]


async def nowhere(address: str) -> Placement | None:
    raise AssertionError(f"{address} is not to be asked")


class FoundReplicas:
    """Keeps the addresses that a fleet reports."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.serving: set[str] = set()
        self.missing = ""
        self.changed = asyncio.Event()

    def on_replica_found(self, address: str) -> None:
        self.addresses.append(address)
        self.changed.set()

    def on_replica_gone(self, address: str) -> bool:
        if address in self.serving:
            return False
        self.addresses.remove(address)
        self.changed.set()
        return True

    def on_workers_missing(self, message: str) -> None:
        self.missing = message


async def test_addresses_are_taken_as_they_are() -> None:
    events = FoundReplicas()
    await Fleet(" unix:/a, 127.0.0.1:50070 ,localhost:1,[::1]:5,", ParallelSettings(), events, nowhere).run()
    assert events.addresses == ["unix:/a", "127.0.0.1:50070", "localhost:1", "[::1]:5"]


async def test_workers_join_and_leave_as_their_name_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] | None = ["10.0.0.2", "10.0.0.1"]

    async def look_up(host: str, port: str, **_: object) -> list[tuple[object, ...]]:
        assert (host, port) == ("workers", "50070")
        if told is None:
            raise OSError("no such name")
        return [(2, 1, 6, "", (address, int(port))) for address in told for _ in range(2)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    monkeypatch.setattr("scheduler_service.replicas.fleet.LOOKUP_SECONDS", 0.01)
    events = FoundReplicas()
    running = asyncio.create_task(Fleet("unix:/a,workers:50070", ParallelSettings(), events, nowhere).run())
    await asyncio.wait_for(events.changed.wait(), 5)
    assert events.addresses == ["unix:/a", "10.0.0.1:50070", "10.0.0.2:50070"]
    told = None
    events.serving = {"10.0.0.1:50070"}
    events.changed.clear()
    told = ["10.0.0.3"]
    await until(lambda: "10.0.0.2:50070" not in events.addresses)
    # One that serves stays until it does not.
    assert events.addresses == ["unix:/a", "10.0.0.1:50070", "10.0.0.3:50070"]
    events.serving.clear()
    await until(lambda: "10.0.0.1:50070" not in events.addresses)
    assert events.addresses == ["unix:/a", "10.0.0.3:50070"]
    running.cancel()


# Replicas of several workers.


async def test_the_workers_of_a_replica_are_joined() -> None:
    events = FoundReplicas()
    await Fleet("unix:/a+unix:/b, c:1+d:2", ParallelSettings(2), events, nowhere).run()
    assert events.addresses == ["unix:/a+unix:/b", "c:1+d:2"]


@pytest.mark.parametrize(
    ("targets", "tensor_size", "pipeline_size", "named"),
    [
        ("unix:/a", 2, 1, "unix:/a names 1 of the 2 workers"),
        ("unix:/a,unix:/b", 2, 1, "unix:/a names 1 of the 2 workers"),
        ("a:1+b:1,10.0.0.1:1+b:2+c:2", 2, 1, "10.0.0.1:1.b:2.c:2 names 3 of the 2"),
        ("a:1+b:1", 1, 1, "names 2 of the 1 workers"),
        ("localhost:1", 4, 1, "see --tensor-parallel-size"),
        ("a:1+b:1+c:1+d:1,e:1+f:1+g:1", 4, 1, "names 3 of the 4"),
        ("a:1+b:1,localhost:1", 1, 2, "localhost:1 names 1 of the 2"),
    ],
)
def test_a_replica_has_all_its_workers(targets: str, tensor_size: int, pipeline_size: int, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        Fleet(targets, ParallelSettings(tensor_size, pipeline_size), FoundReplicas(), nowhere)


async def test_replicas_may_be_smaller_than_the_largest() -> None:
    events = FoundReplicas()
    await Fleet("unix:/a, b:1+c:1+d:1+e:1, f:1+g:1", ParallelSettings(4), events, nowhere).run()
    assert events.addresses == ["unix:/a", "b:1+c:1+d:1+e:1", "f:1+g:1"]


def test_workers_of_one_group_are_a_replica_in_the_order_of_their_indices() -> None:
    placements = {
        "x:1": Placement("g", 1),
        "y:1": Placement("h", 0),
        "z:1": Placement("g", 0),
        "w:1": Placement("h", 1),
    }
    assert make_groups(placements, 2) == (["z:1+x:1", "y:1+w:1"], [])


def test_indices_of_a_group_go_on_from_one_replica_to_the_next() -> None:
    placements = {f"x:{index}": Placement("g", index) for index in (5, 3, 1, 0, 2)}
    missing = ["group g has workers of index 5 where a replica has 4 to 5"]
    assert make_groups(placements, 2) == (["x:0+x:1", "x:2+x:3"], missing)


@pytest.mark.parametrize("indices", [(1,), (0, 0), (0, 1, 1)])
def test_a_group_that_is_not_whole_is_named(indices: tuple[int, ...]) -> None:
    placements = {f"x:{number}": Placement("g", index) for number, index in enumerate(indices)}
    there = ", ".join(map(str, indices))
    assert make_groups(placements, 2) == ([], [f"group g has workers of index {there} where a replica has 0 to 1"])


async def test_workers_of_a_name_make_groups_as_they_come(names: Names) -> None:
    asked: dict[str, Placement | None] = {}
    names["workers"] = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    asked |= {"10.0.0.1:1": Placement("g", 1), "10.0.0.2:1": None, "10.0.0.3:1": Placement("", 0)}

    async def find_placement(address: str) -> Placement | None:
        return asked[address]

    events = FoundReplicas()
    running = asyncio.create_task(Fleet("workers:1,a:1+b:1", ParallelSettings(2), events, find_placement).run())
    await until(lambda: bool(events.missing))
    assert events.addresses == ["a:1+b:1"]
    assert events.missing.split("; ") == [
        "no worker answers at 10.0.0.2:1",
        "the worker at 10.0.0.3:1 was started without --worker-group",
        "group g has workers of index 1 where a replica has 0 to 1",
    ]
    names["workers"].pop()
    asked["10.0.0.2:1"] = Placement("g", 0)
    await until(lambda: not events.missing)
    assert events.addresses == ["a:1+b:1", "10.0.0.2:1+10.0.0.1:1"]
    # Who is in place is not asked again.
    asked.clear()
    # Another worker takes the place of rank 1: that is another replica, once the first does not serve.
    events.serving = {"10.0.0.2:1+10.0.0.1:1"}
    names["workers"] = ["10.0.0.2", "10.0.0.4"]
    asked["10.0.0.4:1"] = Placement("g", 1)
    await until(lambda: "10.0.0.2:1+10.0.0.4:1" in events.addresses)
    assert "10.0.0.2:1+10.0.0.1:1" in events.addresses
    events.serving.clear()
    await until(lambda: events.addresses == ["a:1+b:1", "10.0.0.2:1+10.0.0.4:1"])
    running.cancel()


async def test_workers_at_several_ports_of_a_name_make_groups(names: Names) -> None:
    """As those of pods that have several each."""
    names["pods"] = ["10.0.0.2", "10.0.0.1"]
    asked: list[str] = []

    async def find_placement(address: str) -> Placement | None:
        asked.append(address)
        host, _, port = address.partition(":")
        return Placement(f"pod at {host}", int(port))

    events = FoundReplicas()
    running = asyncio.create_task(Fleet("pods:0,pods:1", ParallelSettings(2), events, find_placement).run())
    await until(lambda: len(events.addresses) == 2)
    names["pods"].append("10.0.0.3")
    await until(lambda: len(events.addresses) == 3)
    assert events.addresses == [f"10.0.0.{number}:0+10.0.0.{number}:1" for number in (1, 2, 3)]
    assert len(asked) == 6, "who is in place is asked again"
    running.cancel()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    """What names mean."""
    told: Names = {}

    async def look_up(host: str, port: str, **_: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (address, int(port))) for address in told[host]]

    monkeypatch.setattr(
        "asyncio.base_events.BaseEventLoop.getaddrinfo", lambda loop, *given, **options: look_up(*given)
    )
    monkeypatch.setattr("scheduler_service.replicas.fleet.LOOKUP_SECONDS", 0.01)
    yield told
