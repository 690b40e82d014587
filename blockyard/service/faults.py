"""Faults on purpose at named points of a step, for tests: what a process does to itself when it gets there.

Off unless the environment has BLOCKYARD_FAULTS when the process starts, for example
`step.after_answer:kill@7,step.before_send:hang`: die right after the seventh answer, stop before the first step is
sent. Being off costs the call of an empty function.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = EventLogger(__name__)

VARIABLE = "BLOCKYARD_FAULTS"

BEFORE_SEND = "step.before_send"
"""Scheduler: a step is planned, and nothing of it has left."""
AFTER_SEND = "step.after_send"
"""Scheduler: a step is on its way to the worker."""
BEFORE_ANSWER = "step.before_answer"
"""Worker: a step is computed, and nobody knows its tokens."""
AFTER_ANSWER = "step.after_answer"
"""Worker: a step's answer is on its way to the scheduler."""
BEFORE_PUBLISH = "step.before_publish"
"""Scheduler: a step's tokens are taken, and no gateway has them."""

BEFORE_LOAD = "model.before_load"
"""Worker: its device is chosen, and no weight is loaded."""
BEFORE_LORA = "lora.before_load"
"""Worker: a LoRA adapter is asked for, and nothing of it is read."""
BEFORE_JOIN = "group.before_join"
"""Worker: a group is to be joined, and no other rank has heard of this one."""
IN_COLLECTIVE = "group.in_collective"
"""Worker: an operation of the group is about to begin, for which other ranks may wait already."""

POINTS = (
    BEFORE_SEND,
    AFTER_SEND,
    BEFORE_ANSWER,
    AFTER_ANSWER,
    BEFORE_PUBLISH,
    BEFORE_LOAD,
    BEFORE_LORA,
    BEFORE_JOIN,
    IN_COLLECTIVE,
)


class Action(StrEnum):
    KILL = "kill"
    """Ends at once, as by the kernel's hand: SIGKILL."""
    HANG = "hang"
    """Stops until somebody sends SIGCONT: SIGSTOP."""
    EXIT = "exit"
    """Ends at once with an exit code and without any word."""
    ERROR = "error"
    """Raises a BlockyardError (BUG)."""


EXIT_CODE = 70


@dataclass(frozen=True, slots=True)
class Fault:
    """At the `number`-th time that `point` is reached (from 1), once."""

    point: str
    action: Action
    number: int = 1

    def __str__(self) -> str:
        return f"{self.point}:{self.action}@{self.number}"


_FORM = re.compile(r"(?P<point>[a-z_.]+):(?P<action>[a-z]+)(?:@(?P<number>[1-9][0-9]*))?")


def parse(text: str) -> tuple[Fault, ...]:
    """Reads `point:action@number`, separated by commas; without a number it is the first time. Raises ValueError."""
    return tuple(_parse_one(part.strip()) for part in text.split(",") if part.strip())


def _parse_one(text: str) -> Fault:
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{VARIABLE}: {text!r} does not have the form point:action@number")
    if match["point"] not in POINTS:
        raise ValueError(f"{VARIABLE}: {match['point']!r} is none of {', '.join(POINTS)}")
    if match["action"] not in list(Action):
        raise ValueError(f"{VARIABLE}: {match['action']!r} is none of {', '.join(Action)}")
    return Fault(match["point"], Action(match["action"]), int(match["number"] or 1))


class Faults:
    """Counts how often each point is reached, and acts when a fault is due. For one thread."""

    def __init__(self, faults: Iterable[Fault], act: Callable[[Fault], None] | None = None) -> None:
        self._due = {(fault.point, fault.number): fault for fault in faults}
        self._counts: dict[str, int] = {}
        self._act = act or _act

    def reach(self, point: str) -> None:
        """Notes that `point` is reached. Raises BlockyardError where the fault is an error."""
        number = self._counts[point] = self._counts.get(point, 0) + 1
        if fault := self._due.pop((point, number), None):
            self._act(fault)


def _act(fault: Fault) -> None:
    log.warning("a fault on purpose", fault=fault)
    match fault.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.HANG:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.EXIT:
            os._exit(EXIT_CODE)
        case Action.ERROR:
            _raise(fault)


def _raise(fault: Fault) -> NoReturn:
    raise BlockyardError(Reason.BUG, f"a fault on purpose: {fault}")


def _nothing(point: str) -> None:
    """What `reach` is in production."""


def _from_environment() -> Callable[[str], None]:
    faults = parse(os.environ.get(VARIABLE, ""))
    return Faults(faults).reach if faults else _nothing


reach = _from_environment()
"""Called where a point is reached, with its name."""
