"""Decides which of several models to load, to hold and to unload. A function of their states and the time.

There are fewer places than models. A model that has requests takes a free place, or that of the model that is idle for
longest. If no model is idle, the one that was loaded first gives its place up after its turn: new requests wait (it is
held) until those under way have ended, or have had a second turn. A hold always ends with the unloading.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Phase(Enum):
    """Where a model is between two loads."""

    UNLOADED = "unloaded"
    LOADED = "loaded"
    HELD = "held"
    ENDING = "ending"


class Act(Enum):
    """An action on a model."""

    LOAD = "load"
    HOLD = "hold"
    UNLOAD = "unload"


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model as it is now. Times are those of one clock, in seconds.

    Attributes:
        phase: LOADED from the start of its processes on.
        num_requests: running and waiting ones.
        used_at: the last time at which it had requests.
        since: the time at which an unloaded model got its first request, at which a loaded one became ready, or at
            which a held one was held. Infinite: it has not happened yet.
        is_drained: whether a held model has no requests left under way.
    """

    name: str
    phase: Phase
    num_requests: int
    used_at: float
    since: float
    is_drained: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """The number of places, and the times of the settings of the same names; idle_unload_seconds 0: never."""

    num_places: int
    idle_unload_seconds: float = 0.0
    turn_seconds: float = 30.0


def decide(models: Sequence[ModelState], now: float, limits: Limits) -> list[tuple[Act, str]]:
    """Returns what is to be done now. A later decision follows from what has become of it."""
    waiting = sorted(
        (model for model in models if model.phase is Phase.UNLOADED and model.num_requests),
        key=lambda model: model.since,
    )
    num_taken = sum(model.phase is not Phase.UNLOADED for model in models)
    loading, waiting = _split(waiting, limits.num_places - num_taken)
    held = [model for model in models if model.phase is Phase.HELD]
    leaving = [model for model in held if model.is_drained or now - model.since >= limits.turn_seconds]
    # Places that become free without a further decision are not asked for again.
    num_missing = len(waiting) - len(held) - sum(model.phase is Phase.ENDING for model in models)
    loaded = [model for model in models if model.phase is Phase.LOADED]
    idle = sorted((model for model in loaded if not model.num_requests), key=lambda model: model.used_at)
    replaced, idle = _split(idle, num_missing)
    if limits.idle_unload_seconds:
        leaving += [model for model in idle if now - model.used_at >= limits.idle_unload_seconds]
    busy = [model for model in loaded if model.num_requests and now - model.since >= limits.turn_seconds]
    holding, _ = _split(sorted(busy, key=lambda model: model.since), num_missing - len(replaced))
    return [
        *((Act.LOAD, model.name) for model in loading),
        *((Act.UNLOAD, model.name) for model in (*leaving, *replaced)),
        *((Act.HOLD, model.name) for model in holding),
    ]


def _split(models: list[ModelState], number: int) -> tuple[list[ModelState], list[ModelState]]:
    """Returns the first `number` models, none if it is negative, and the others."""
    number = max(0, number)
    return models[:number], models[number:]
