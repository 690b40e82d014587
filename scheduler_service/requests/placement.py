"""Chooses the replica for a request, among those with room for it. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scheduler_service.core.config import Room
    from scheduler_service.core.sequence import Group
    from scheduler_service.replicas.engine import Engine


def choose_engine(group: Group, rooms: Mapping[Engine, Room]) -> Engine | None:
    """Chooses the replica with the longest cached prefix among those with room; of equals that with most rows free."""
    size = measure(group)
    candidates = [engine for engine, room in rooms.items() if room.takes(*size)]
    candidates = candidates or [engine for engine, room in rooms.items() if room.takes_urgent(group)]
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    fitting = [engine for engine in candidates if rooms[engine].fits(*size)] or candidates
    return max(fitting, key=lambda engine: (_count_cached(engine, group), rooms[engine].num_rows))


def is_urgent(group: Group, rooms: Mapping[Engine, Room]) -> bool:
    """Whether a replica would make room for a request at the expense of others."""
    return any(room.takes_urgent(group) for room in rooms.values())


def measure(group: Group) -> tuple[int, int]:
    """Counts the tokens that a request has to prefill, and its rows."""
    return sum(len(sequence.token_ids) for sequence in group.live), len(group.live)


def _count_cached(engine: Engine, group: Group) -> int:
    assert engine.scheduler is not None
    return engine.scheduler.count_cached_tokens(group)
