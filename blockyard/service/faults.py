"""Injects faults at named points of a step, for tests.

Off unless the environment has BLOCKYARD_FAULTS when the process starts, for example
`step.after_answer:kill@7,step.before_send:hang`: die right after the seventh answer, stop before the first step is
sent. When off it costs the call of an empty function.
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
"""Scheduler: a step is planned and not sent yet."""
AFTER_SEND = "step.after_send"
"""Scheduler: a step is on its way to the worker."""
BEFORE_ANSWER = "step.before_answer"
"""Worker: a step is computed and its tokens are not sent yet."""
AFTER_ANSWER = "step.after_answer"
"""Worker: a step's answer is on its way to the scheduler."""
BEFORE_PUBLISH = "step.before_publish"
"""Scheduler: a step's tokens are applied and not sent to gateways yet."""

BEFORE_LOAD = "model.before_load"
"""Worker: the device is chosen and no weights are loaded yet."""
BEFORE_LORA = "lora.before_load"
"""Worker: a LoRA adapter is requested and not read yet."""
BEFORE_JOIN = "group.before_join"
"""Worker: a group is about to be joined and no other rank has been contacted."""
IN_COLLECTIVE = "group.in_collective"
"""Worker: a collective operation is about to begin; other ranks may already wait in it."""

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
    """The process is killed by SIGKILL."""
    HANG = "hang"
    """The process is stopped by SIGSTOP until it gets SIGCONT."""
    EXIT = "exit"
    """The process exits at once with EXIT_CODE, without cleanup."""
    ERROR = "error"
    """The point raises a BlockyardError (BUG)."""


EXIT_CODE = 70


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, which happens the `number`-th time (from 1) that `point` is reached."""

    point: str
    action: Action
    number: int = 1

    def __str__(self) -> str:
        return f"{self.point}:{self.action}@{self.number}"


_FORM = re.compile(r"(?P<point>[a-z_.]+):(?P<action>[a-z]+)(?:@(?P<number>[1-9][0-9]*))?")


def parse(text: str) -> tuple[Fault, ...]:
    """Parses comma-separated `point:action@number`; the default number is 1. Raises ValueError."""
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
    """Counts how often each point is reached, and triggers due faults. Not thread-safe."""

    def __init__(self, faults: Iterable[Fault], act: Callable[[Fault], None] | None = None) -> None:
        self._due = {(fault.point, fault.number): fault for fault in faults}
        self._counts: dict[str, int] = {}
        self._act = act or _act

    def reach(self, point: str) -> None:
        """Counts `point`, and triggers a due fault. Raises BlockyardError for the action ERROR."""
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
    """Does nothing: `reach` in production."""


def _from_environment() -> Callable[[str], None]:
    faults = parse(os.environ.get(VARIABLE, ""))
    return Faults(faults).reach if faults else _nothing


reach = _from_environment()
"""The function to call at a point, with the point's name."""
