"""Which replica a request with an adapter goes to: real rooms, backlogs and caches, without engines around them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from blockyard.contract.scheduling import Adapter
from scheduler_service.core.queues.backlog import Backlog
from scheduler_service.core.sequence import Group
from scheduler_service.replicas.loras.replica_loras import ReplicaLoras
from scheduler_service.requests.placement import assign
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

MAX_LORAS = 2


@dataclass(eq=False)
class Place:
    """A replica as placement sees it."""

    name: str
    bench: Bench = field(default_factory=lambda: Bench(configure(max_loras=MAX_LORAS)))
    loras: ReplicaLoras = field(default_factory=lambda: ReplicaLoras((), 8))

    @property
    def scheduler(self) -> Any:
        return self.bench.scheduler

    def load(self, *lora_ids: int) -> None:
        for lora_id in lora_ids:
            self.loras.loaded[lora_id] = Adapter(lora_id, f"a{lora_id}", "/a")

    def run(self, *lora_ids: int) -> None:
        """Begins a long sequence with each of these adapters."""
        self.load(*lora_ids)
        for lora_id in lora_ids:
            self.bench.add(make_spec(f"{self.name}-{lora_id}", lora_id=lora_id, max_tokens=100))
        self.bench.step()

    @property
    def asked(self) -> list[int]:
        return list(self.loras._asked)


class System:
    def __init__(self, num_replicas: int) -> None:
        self.places = [Place(str(number)) for number in range(num_replicas)]
        self.backlog = Backlog("fcfs", 60.0)
        self.num_requests = 0

    def submit(self, *lora_ids: int) -> None:
        for lora_id in lora_ids:
            self.num_requests += 1
            spec = make_spec(f"r{self.num_requests}", lora_id=lora_id)
            self.backlog.push(Group(spec, 1000 + self.num_requests, 100, 0.0), float(self.num_requests))

    def assign(self) -> list[tuple[int, str]]:
        """Places what waits; the adapter of each request that was placed, and where."""
        rooms = cast("Any", {place: place.scheduler.find_room() for place in self.places})
        return [(group.spec.lora_id, cast("Any", engine).name) for group, engine in assign(self.backlog, rooms)]


def test_an_adapter_goes_where_it_is_in_a_slot_though_others_have_more_room() -> None:
    system = System(3)
    idle, loaded, resident = system.places
    resident.run(1, 2)
    loaded.load(1)
    system.submit(1, 1)
    assert system.assign() == [(1, "2"), (1, "2")]
    assert idle.asked == []


def test_then_where_it_is_loaded_and_fewest_slots_are_used() -> None:
    system = System(3)
    _, busy, quiet = system.places
    busy.run(2)
    for place in (busy, quiet):
        place.load(1)
    system.submit(1)
    assert system.assign() == [(1, "2")]
    # By now there is one more in a slot: where most rows are free, of two with one slot each.
    quiet.load(3)
    busy.load(3)
    quiet.run(4, 5)
    system.submit(3)
    assert system.assign() == [(3, "1")]


def test_of_free_slots_the_empty_one_is_taken() -> None:
    """An adapter that nobody uses just now stays where it is."""
    system = System(2)
    for place in system.places:
        place.load(1, 2)
    warm, _ = system.places
    warm.bench.add(make_spec("0-1", lora_id=1))
    warm.bench.run()
    system.submit(2, 1)
    assert system.assign() == [(2, "1"), (1, "0")]


def test_one_that_nobody_has_is_loaded_where_most_slots_are_free() -> None:
    system = System(2)
    busy, quiet = system.places
    busy.run(2)
    system.submit(1, 0)
    assert system.assign() == [(0, "1")], "who needs none goes on"
    assert (busy.asked, quiet.asked) == ([], [1])
    quiet.load(1)
    assert system.assign() == [(1, "1")]


def test_one_that_waits_for_slots_where_it_is_loaded_is_loaded_where_one_is_free() -> None:
    system = System(3)
    full, other_full, free = system.places
    full.run(2, 3)
    other_full.run(4, 5)
    full.load(1)
    system.submit(1, 1)
    assert system.assign() == [(1, "0")], "one waits there, so that it gets a slot in its turn"
    assert [place.asked for place in system.places] == [[], [], [1]]
    free.load(1)
    assert system.assign() == [(1, "2")]
    assert other_full.asked == []


def test_a_prompt_goes_where_it_is_cached_with_its_salt() -> None:
    system = System(2)
    prompt = tuple(range(3, 15))
    for place, salt in zip(system.places, (b"one", b"two"), strict=True):
        place.bench.add(make_spec("before", prompt, 1, cache_salt=salt))
        place.bench.run()
    placed: list[tuple[bytes, str]] = []
    for salt in (b"two", b"one", b"two"):
        system.num_requests += 1
        spec = make_spec(f"r{system.num_requests}", prompt, cache_salt=salt)
        system.backlog.push(Group(spec, 1000 + system.num_requests, 100, 0.0), float(system.num_requests))
        placed += [(salt, name) for _, name in system.assign()]
    assert placed == [(b"two", "1"), (b"one", "0"), (b"two", "1")]
