"""What runs next in a simulation: simulated processes, their ready callbacks, and timers on a virtual clock.

`tests.kit.simulation.loop` says which order this keeps and why.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections import deque
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from tests.kit.simulation.trace import Trace

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

T = TypeVar("T")

# Virtual seconds that a callback takes, unless its owner is slowed.
CALLBACK_SECONDS = 1e-6
# The virtual time at the start. Not 0, which code may take for "never".
START_SECONDS = 1000.0


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is left."""


class Owner:
    """A simulated process, as the loop knows it. A process that is started again is a new owner.

    Attributes:
        alive: whether it has not been killed.
        frozen: whether it is stopped, as by SIGSTOP.
        slowdown: how many times as long as usual its callbacks take; 1: usual.
    """

    __slots__ = (
        "_generators",
        "_idle",
        "_kept",
        "_num_made",
        "_paused",
        "_queue",
        "_tasks",
        "alive",
        "frozen",
        "name",
        "slowdown",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.slowdown = 1.0
        # Ready callbacks. They are never run once the owner is dead, but kept: dropping them could run finalizers.
        self._queue: deque[asyncio.Handle] = deque()
        # Whether nothing is ready and nothing keeps the owner from running: the next callback makes it runnable.
        self._idle = True
        # Whether a slow owner is still busy with its last callback.
        self._paused = False
        self._tasks: WeakValueDictionary[int, asyncio.Task[Any]] = WeakValueDictionary()
        self._generators: WeakValueDictionary[int, AsyncGenerator[Any]] = WeakValueDictionary()
        # Numbers its tasks and generators.
        self._num_made = 0
        # The tasks and generators that it had when it was killed.
        self._kept: list[Any] = []

    def __repr__(self) -> str:
        return f"<Owner {self.name}>"


OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)


class _Handle(asyncio.Handle):
    """asyncio's handle, made faster."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Schedule, context: contextvars.Context) -> None:
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: Schedule, context: contextvars.Context) -> None:
        self._when = when
        self._scheduled = True
        self._context = context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class Schedule(asyncio.AbstractEventLoop):
    """The half of `SimLoop` that keeps time and order. `seed`: what they are drawn from."""

    def __init__(self, seed: int | str) -> None:
        self.seed = seed
        self.random = self.random_for("schedule")
        self.trace = Trace()
        self.main = Owner("main")
        self._now = START_SECONDS
        self._owners = [self.main]
        # Owners that have ready callbacks and may run.
        self._runnable: list[Owner] = []
        self._timers: list[tuple[float, int, _Timer, Owner]] = []
        self._num_timers = 0
        self._num_cancelled_timers = 0
        self._is_closed = False

    def random_for(self, purpose: str) -> random.Random:
        """Returns a source of random numbers that depends on the seed and the purpose only."""
        return random.Random(f"{self.seed}/{purpose}")

    def note(self, event: str) -> None:
        """Adds an event to the trace."""
        self.trace.record(self._now, "note", event)

    # Owners.

    def owner(self, name: str) -> Owner:
        """Makes a new owner. Names may repeat: a process that starts again keeps its name."""
        owner = Owner(name)
        self._owners.append(owner)
        return owner

    def current_owner(self) -> Owner:
        return OWNER.get() or self.main

    def context_of(self, owner: Owner) -> contextvars.Context:
        """Returns a new context in which code belongs to an owner; it has no other variables."""
        context = contextvars.Context()
        context.run(OWNER.set, owner)
        return context

    def spawn(self, owner: Owner, coro: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Starts a task of an owner. Once the owner is killed, the task never ends: do not wait for it alone."""
        return self.create_task(coro, name=name, context=self.context_of(owner))

    def kill(self, owner: Owner) -> None:
        """Ends an owner at once: none of its code runs again, not even `finally` or `__del__`.

        If the owner's own code calls this, that code runs until its next await. What the owner had stays in memory
        until the loop is closed.
        """
        owner.alive = False
        owner._kept = [*owner._tasks.values(), *owner._generators.values()]
        self._settle(owner)

    def freeze(self, owner: Owner) -> None:
        """Stops an owner. Its timers go on, and what they call runs after `thaw`."""
        owner.frozen = True
        self._settle(owner)

    def thaw(self, owner: Owner) -> None:
        owner.frozen = False
        self._settle(owner)

    def slow(self, owner: Owner, factor: float) -> None:
        """Makes an owner's callbacks and its threads' work take `factor` times as long as usual; 1: as usual."""
        owner.slowdown = factor

    def _settle(self, owner: Owner) -> None:
        """Makes an owner runnable or not, after something changed that decides it."""
        may_run = owner.alive and not owner.frozen and not owner._paused
        is_runnable = owner in self._runnable
        if is_runnable and not (may_run and owner._queue):
            self._runnable.remove(owner)
        elif not is_runnable and may_run and owner._queue:
            self._runnable.append(owner)
        owner._idle = may_run and not owner._queue

    def _pause(self, owner: Owner) -> None:
        """Keeps a slow owner busy with the callback that begins now."""
        owner._paused = True
        self._settle(owner)
        seconds = CALLBACK_SECONDS * owner.slowdown
        self.call_later(seconds, self._end_pause, owner, context=contextvars.Context())

    def _end_pause(self, owner: Owner) -> None:
        owner._paused = False
        self._settle(owner)

    # Callbacks and timers.

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        if context is None:
            context = contextvars.copy_context()
        owner = context.get(OWNER) or self.main
        handle = _Handle(callback, args, self, context)
        if self._is_closed:
            # Code of a run that is over, which the collector has found: nothing observes it.
            return handle
        owner._queue.append(handle)
        if owner._idle:
            owner._idle = False
            self._runnable.append(owner)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        if context is None:
            context = contextvars.copy_context()
        timer = _Timer(when, callback, args, self, context)
        if self._is_closed:
            return timer
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer, context.get(OWNER) or self.main))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Removes cancelled timers once they are the most; `TimerHandle.cancel` calls this."""
        if handle._scheduled:
            self._num_cancelled_timers += 1
        if self._num_cancelled_timers > 100 and 2 * self._num_cancelled_timers > len(self._timers):
            self._timers[:] = [entry for entry in self._timers if not entry[2]._cancelled and entry[2] is not handle]
            heapq.heapify(self._timers)
            # The handle is marked after this call.
            self._num_cancelled_timers = 0

    def _fire_timers(self) -> None:
        """Makes ready what is due. If nothing is ready, time goes on to the next timer first."""
        while self._timers:
            when, _, timer, owner = self._timers[0]
            if timer._cancelled:
                heapq.heappop(self._timers)
                self._num_cancelled_timers -= 1
                continue
            if when > self._now:
                if self._runnable:
                    return
                self._now = when
            heapq.heappop(self._timers)
            timer._scheduled = False
            owner._queue.append(timer)
            if owner._idle:
                owner._idle = False
                self._runnable.append(owner)
        if not self._runnable:
            raise Deadlock(f"nothing is ready, and no timer is left; these tasks wait: {self.describe_tasks()}")
