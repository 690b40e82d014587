"""When a chaos run strikes what, and how: a function of the seed alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from blockyard.service import faults

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

# After a strike at a member, until it is back and its requests have got tokens again: a request that dies three times
# in a row without one is rightly taken for the cause.
MIN_REST_SECONDS = 5.0


class Kind(StrEnum):
    """What happens to a member of the cluster."""

    KILL = "kill"
    """SIGKILL."""
    FREEZE = "freeze"
    """SIGSTOP for a while."""
    ARM = "kill at a point"
    """SIGKILL, and once more by itself at a named point of a step in its next life."""
    PARTITION = "partition"
    """Nothing comes through to it for a while."""
    CUT = "cut"
    """Its connections are reset; it goes on."""
    CUT_GROUP = "cut from its group"
    """Its connections to the other ranks of its replica end."""
    FREEZE_GROUP = "freeze with its group"
    """Nothing comes in any more over its connections to the other ranks."""


_ALONE = (Kind.KILL, Kind.FREEZE, Kind.ARM, Kind.PARTITION, Kind.CUT)
POINTS = {
    "worker": (faults.BEFORE_ANSWER, faults.AFTER_ANSWER),
    "rank": (faults.BEFORE_ANSWER, faults.AFTER_ANSWER, faults.IN_COLLECTIVE),
    "scheduler": (faults.BEFORE_SEND, faults.AFTER_SEND, faults.BEFORE_PUBLISH),
}
KINDS_OF = {
    "worker": _ALONE,
    "rank": tuple(Kind),
    "scheduler": _ALONE,
    "gateway": (Kind.KILL, Kind.FREEZE),
}


@dataclass(frozen=True, slots=True)
class Strike:
    """One blow.

    Attributes:
        at_seconds: since the beginning of the run.
        name: of the member.
        seconds: how long a freeze or a partition lasts.
        armed: faults of the member's next life.
    """

    at_seconds: float
    kind: Kind
    name: str
    seconds: float = 0.0
    armed: str = ""

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at_seconds:7.2f} s: {self.kind} {self.name}{lasting} {self.armed}".rstrip()


@dataclass(frozen=True, slots=True)
class Rates:
    """How often and how long.

    Attributes:
        mean_seconds: between two strikes.
        max_freeze_seconds: of a freeze or a partition.
        kinds: those that come at all.
        roles: what is struck, where it is there: worker, rank, scheduler, gateway.
    """

    mean_seconds: float = 2.0
    max_freeze_seconds: float = 4.0
    kinds: Collection[Kind] = tuple(Kind)
    roles: Collection[str] = ("worker", "rank", "scheduler", "gateway")


def make_schedule(seed: int, seconds: float, names: Sequence[str], rates: Rates) -> list[Strike]:
    """Makes all strikes of a run of so many seconds at members of these names, in order of time."""
    return list(_strikes(random.Random(f"{seed}/strikes"), seconds, names, rates))


def _strikes(draw: random.Random, seconds: float, names: Sequence[str], rates: Rates) -> Iterator[Strike]:
    roles = [role for role in KINDS_OF if role in rates.roles and role in map(_role, names)]
    choices = [
        (kind, name) for name in names for kind in KINDS_OF[_role(name)] if kind in rates.kinds and _role(name) in roles
    ]
    rested_at = dict.fromkeys(names, 0.0)
    now = 0.5
    while now < seconds:
        # By kind and role first, so that two workers are not struck twice as often as one scheduler.
        role = draw.choice(roles)
        able = [(kind, name) for kind, name in choices if _role(name) == role and rested_at[name] <= now]
        if able:
            kind, name = draw.choice(able)
            strike = _make(draw, now, kind, name, rates)
            rested_at[name] = now + strike.seconds + MIN_REST_SECONDS
            yield strike
        now += min(draw.expovariate(1 / rates.mean_seconds), 3 * rates.mean_seconds)


def _role(name: str) -> str:
    return name.partition("-")[0]


def _make(draw: random.Random, now: float, kind: Kind, name: str, rates: Rates) -> Strike:
    if kind in (Kind.FREEZE, Kind.PARTITION):
        return Strike(now, kind, name, seconds=draw.uniform(0.2, rates.max_freeze_seconds))
    if kind is Kind.ARM:
        fault = faults.Fault(draw.choice(POINTS[_role(name)]), faults.Action.KILL, draw.randint(10, 60))
        return Strike(now, kind, name, armed=str(fault))
    return Strike(now, kind, name)
