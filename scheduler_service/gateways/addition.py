"""A request that a gateway adds, as the scheduler plans by it. Knows no generated code: see `codec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.contract.scheduling import Adapter, Resubmission
    from scheduler_service.core.values import GroupSpec


@dataclass(frozen=True, slots=True)
class Addition:
    """A request that a gateway adds.

    `submission`: the bytes that the gateway sent, for whoever resumes the request. `age_seconds`: how long ago the
    request reached its gateway.
    """

    spec: GroupSpec
    handle: int
    digest: bytes
    submission: bytes
    max_queue_seconds: float | None = None
    remaining_seconds: float | None = None
    resubmission: Resubmission | None = None
    age_seconds: float = 0.0
    adapter: Adapter | None = None
    fails_on_update: bool = False
