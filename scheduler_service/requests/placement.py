"""Chooses the replica for each request that waits, among those with room for it. Knows no gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from scheduler_service.core.config import Room
    from scheduler_service.core.queues.backlog import Backlog
    from scheduler_service.core.sequence import Group
    from scheduler_service.replicas.engine import Engine


def assign(backlog: Backlog, rooms: Mapping[Engine, Room]) -> Iterator[tuple[Group, Engine]]:
    """Takes requests from the backlog as long as replicas have room; yields each with its replica.

    The requests fill the rooms.
    """
    # Adapters for which no replica has a slot; requests with others may pass.
    passed: set[int] = set()
    while (group := backlog.peek(passed)) is not None:
        engine = choose_engine(group, rooms)
        if engine is None and waits_for_slot(group, rooms):
            passed.add(group.spec.lora_id)
            _ask_for_adapter(group.spec.lora_id, rooms)
            continue
        if engine is None:
            # A request that ran before must not block one for which others are preempted.
            group = backlog.peek_new(passed)
            engine = choose_engine(group, rooms) if group is not None and is_urgent(group, rooms) else None
        if group is None or engine is None:
            return
        backlog.take(group)
        if group.spec.lora:
            engine.loras.use(group.spec.lora_id)
        rooms[engine].take(*measure(group), group.spec.tenant, group.spec.lora_id)
        yield group, engine


def choose_engine(group: Group, rooms: Mapping[Engine, Room]) -> Engine | None:
    """Chooses the replica with the longest cached prefix among those with room, then the one with the most free rows.

    A request with an adapter prefers a replica with the adapter in a slot, or with a free slot.
    """
    size, lora_id = measure(group), group.spec.lora_id
    rooms = {engine: room for engine, room in rooms.items() if engine.loras.has(lora_id)} if lora_id else rooms
    candidates = [engine for engine, room in rooms.items() if room.takes(*size, lora_id)]
    candidates = candidates or [engine for engine, room in rooms.items() if room.takes_urgent(group)]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    fitting = [engine for engine in candidates if rooms[engine].fits(*size)] or candidates

    def rank(engine: Engine) -> tuple[tuple[int, int], int, int]:
        room = rooms[engine]
        return room.loras.rank(lora_id), _count_cached(engine, group), room.num_rows

    return max(fitting, key=rank)


def waits_for_slot(group: Group, rooms: Mapping[Engine, Room]) -> bool:
    """Whether only its adapter keeps a request from the replicas that have room for it, so that others may pass."""
    size = measure(group)
    return group.spec.lora_id != 0 and any(room.takes(*size) for room in rooms.values())


def _ask_for_adapter(lora_id: int, rooms: Mapping[Engine, Room]) -> None:
    """Has an adapter loaded where most slots are free: in a free slot, or anywhere if no replica has it loaded."""
    without = [engine for engine in rooms if not engine.loras.has(lora_id)]
    if without:
        best = max(without, key=lambda engine: rooms[engine].loras.rank(lora_id))
        if len(without) == len(rooms) or rooms[best].loras.has_slot(lora_id):
            best.loras.want(lora_id)


def is_urgent(group: Group, rooms: Mapping[Engine, Room]) -> bool:
    """Whether a replica would preempt others for a request."""
    return any(room.takes_urgent(group) for room in rooms.values())


def measure(group: Group) -> tuple[int, int]:
    """Counts the tokens that a request has to prefill, and its rows."""
    return sum(len(sequence.token_ids) for sequence in group.live), len(group.live)


def _count_cached(engine: Engine, group: Group) -> int:
    assert engine.scheduler is not None
    return engine.scheduler.count_cached_tokens(group)


def are_asleep(engines: Sequence[Engine]) -> bool:
    """Returns whether there are replicas and all of them are asleep."""
    return bool(engines) and all(engine.is_asleep for engine in engines)
