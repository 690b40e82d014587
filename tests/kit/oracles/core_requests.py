"""Requests for the scheduler's core, given to it as the admission of the scheduler's service does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core.sequence import Group

if TYPE_CHECKING:
    from scheduler_service.core.scheduler import Scheduler
    from scheduler_service.core.values import GroupSpec


def add_request(scheduler: Scheduler, spec: GroupSpec, first_sequence_id: int, now: float = 0.0) -> Group:
    """Lets a request wait. Its ids begin with `first_sequence_id`; none may be in use. Raises as `CoreConfig.fit`."""
    group = Group(spec, first_sequence_id, scheduler.config.fit(spec), now)
    scheduler.adopt([group])
    return group
