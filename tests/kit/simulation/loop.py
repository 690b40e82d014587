"""An asyncio event loop on a virtual clock, whose schedule is drawn from a seed.

One loop runs several simulated processes, which are called owners here. Code belongs to the owner that the context
variable `OWNER` names; tasks, callbacks and timers inherit it from the code that makes them.

- Order: each owner's callbacks run in the order in which they became ready, as on a loop of its own, because asyncio
  promises this and libraries rely on it. Which owner runs next is drawn for each callback. So processes interleave in
  every way, and a process sees only what its real loop could show it. Events of one process that race in reality
  (messages, ends of threads' work) race here by the delays that are drawn for them.
- Time: each callback takes a microsecond. If nothing is ready, time jumps to the next timer. If there is none either,
  `Deadlock` names the tasks that wait. Timers of the same instant fire in the order in which they were made.
- Threads: `run_in_executor` runs the work on the loop, between two delays that are drawn. Executors with one thread
  run their work in order. Sockets, subprocesses, signals, and threads that outlive the run or call the loop raise
  `NotSimulated`.
- Trace: a hash over the virtual time and the name of each callback, and over `note`d events. Two runs of a program from
  one seed have one hash unless the program depends on what is not simulated: the real time, `id`, the hash seed, or the
  order of a set of objects that hash by `id`; tasks and futures do not. The garbage collector is off during a run,
  because it would run finalizers at its own times.
- Errors that nobody retrieves fail the run at its end.

`run` is to this loop what `asyncio.run` is to asyncio's.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from tests.kit.simulation.burial import bury
from tests.kit.simulation.schedule import CALLBACK_SECONDS, OWNER, START_SECONDS, Deadlock, Owner, Schedule
from tests.kit.simulation.trace import name_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence

__all__ = ["OWNER", "Deadlock", "NotSimulated", "Outcome", "Owner", "SimLoop", "TooLong", "run"]

T = TypeVar("T")

# The shortest and the longest delay before a thread begins its work, and again before the loop sees the result.
EXECUTOR_SECONDS = (20e-6, 2e-3)
# Virtual seconds that cancelled tasks have to end when the main coroutine has ended.
END_SECONDS = 60.0


class NotSimulated(RuntimeError):
    """The program used something that the simulation cannot repeat."""


class TooLong(RuntimeError):
    """The run took more callbacks than it may."""


class SimFuture(asyncio.Future[Any]):
    """A future whose hash is a number, so that sets of futures have the same order in every run."""

    __slots__ = ("_number",)

    def __init__(self, loop: SimLoop, number: int) -> None:
        # Before asyncio's own, which puts a task into a set.
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimTask(asyncio.Task[Any]):
    """A task whose hash is a number, for the same reason."""

    __slots__ = ("_number",)

    def __init__(self, coro: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimLoop(Schedule):
    """See the module. `random` is what the schedule is drawn from; others take their own from `random_for`.

    Attributes:
        names: the addresses of each host name that `getaddrinfo` knows.
        errors: errors that nobody retrieved so far.
    """

    def __init__(self, seed: int | str, max_callbacks: int = 100_000_000) -> None:
        super().__init__(seed)
        self.names: dict[str, Sequence[str]] = {}
        self.errors: list[BaseException] = []
        self.num_callbacks = 0
        self._num_futures = 0
        self._max_callbacks = max_callbacks
        self._thread_id: int | None = None
        self._stopping = False
        # When an executor of one thread is free again.
        self._busy_until: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

    # Running.

    def run_forever(self) -> None:
        if self._thread_id is not None:
            raise RuntimeError("this loop runs already")
        self._thread_id, self._stopping = threading.get_ident(), False
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._on_generator, finalizer=self._on_dropped_generator)
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._run_callbacks()
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            self._thread_id = None

    def _run_callbacks(self) -> None:
        """Runs callbacks until the loop is stopped, or one of them fails."""
        runnable, timers, draw, record = self._runnable, self._timers, self.random.random, self.trace.record
        while not self._stopping:
            if not runnable or (timers and timers[0][0] <= self._now):
                self._fire_timers()
            index = int(draw() * len(runnable)) if len(runnable) > 1 else 0
            owner = runnable[index]
            handle = owner._queue.popleft()
            if owner.slowdown != 1.0:
                self._pause(owner)
            elif not owner._queue:
                owner._idle = True
                runnable[index] = runnable[-1]
                runnable.pop()
            if handle._cancelled:
                continue
            self._now += CALLBACK_SECONDS
            self.num_callbacks += 1
            if self.num_callbacks > self._max_callbacks:
                raise TooLong(f"more than {self._max_callbacks} callbacks; tasks: {self.describe_tasks()}")
            record(self._now, owner.name, name_of(handle._callback))
            try:
                handle._context.run(handle._callback, *handle._args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # noqa: BLE001 - asyncio catches the same
                self.call_exception_handler({"message": "a callback failed", "exception": error, "handle": handle})

    def stop(self) -> None:
        self._stopping = True

    def is_running(self) -> bool:
        return self._thread_id is not None

    def is_closed(self) -> bool:
        return self._is_closed

    def run_until_complete(self, future: Any) -> Any:
        future = asyncio.ensure_future(future, loop=self)
        future.add_done_callback(self._on_complete)
        self.run_forever()
        return future.result()

    def _on_complete(self, _: object) -> None:
        self.stop()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end and cancels what is left. Raises its error, or those that nobody retrieved."""
        collects, threads = gc.isenabled(), threading.enumerate()
        gc.disable()
        try:
            result = self.run_until_complete(self.create_task(main, name="main"))
            self._end()
            if started := sorted(thread.name for thread in threading.enumerate() if thread not in threads):
                raise NotSimulated(f"threads were started: {', '.join(started)}")
        except BaseException as error:
            for other in self.errors:
                error.add_note(f"besides, nobody retrieved {other!r}")
            raise
        finally:
            self.close()
            if collects:
                gc.enable()
        if self.errors:
            raise BaseExceptionGroup("errors that nobody retrieved", self.errors)
        return result

    def _end(self) -> None:
        """Cancels all tasks, and waits for them and for the generators."""
        for owner in self._owners:
            self.slow(owner, 1.0)
            if owner.frozen:
                self.kill(owner)
        if tasks := self._pending_tasks():
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=END_SECONDS))
        self.run_until_complete(self.shutdown_asyncgens())
        if self._pending_tasks():
            raise RuntimeError(f"these tasks did not end when they were cancelled: {self.describe_tasks()}")
        for owner in self._owners:
            for task in list(owner._tasks.values()) if owner.alive else ():
                # asyncio's own mark of an exception that nobody has looked at.
                if task._log_traceback:
                    task._log_traceback = False
                    self.errors.append(task.exception())

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        # What `finally` blocks start belongs to this loop, which runs nothing more, and to no other.
        asyncio._set_running_loop(self)
        try:
            for owner in self._owners:
                bury(list(owner._tasks.values()), owner._queue)
                owner._kept.clear()
        finally:
            asyncio._set_running_loop(None)
        self._timers.clear()

    # Tasks and futures.

    def create_future(self) -> asyncio.Future[Any]:
        self._num_futures += 1
        return SimFuture(self, self._num_futures)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None, **options: Any) -> Any:
        owner = (OWNER.get() if context is None else context.get(OWNER)) or self.main
        owner._num_made = number = owner._num_made + 1
        name = name or f"{getattr(coro, '__qualname__', 'task')}-{number}"
        self._num_futures += 1
        task = SimTask(coro, self._num_futures, loop=self, name=name, context=context, **options)
        owner._tasks[number] = task
        if self._is_closed:
            task._log_destroy_pending = False
            coro.close()
        return task

    def get_task_factory(self) -> None:
        return None

    def _pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Returns the unfinished tasks of live owners, in the order in which they were made."""
        owners = (owner for owner in self._owners if owner.alive)
        return [task for owner in owners for task in list(owner._tasks.values()) if not task.done()]

    def describe_tasks(self) -> str:
        places: list[str] = []
        for owner in self._owners:
            for task in list(owner._tasks.values()) if owner.alive else ():
                for frame in task.get_stack(limit=1) if not task.done() else ():
                    state = ", frozen" if owner.frozen else ""
                    file = frame.f_code.co_filename.rpartition("/")[2]
                    places.append(f"{owner.name} {task.get_name()} ({file}:{frame.f_lineno}{state})")
        return "; ".join(places) or "none"

    # Generators.

    def _on_generator(self, generator: AsyncGenerator[Any]) -> None:
        owner = self.current_owner()
        owner._num_made += 1
        owner._generators[owner._num_made] = generator

    def _on_dropped_generator(self, generator: AsyncGenerator[Any]) -> None:
        if not self._is_closed:
            self.create_task(generator.aclose(), name=f"aclose {generator.__qualname__}")

    async def shutdown_asyncgens(self) -> None:
        for owner in self._owners:
            for generator in list(owner._generators.values()) if owner.alive else ():
                await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as in asyncio
        return

    # Threads and names.

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        if self._thread_id is not None and threading.get_ident() != self._thread_id:
            error = NotSimulated(f"another thread called the loop, for {name_of(callback)}")
            self.errors.append(error)
            raise error
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Runs work on the loop after a delay that is drawn, and delivers its result after another.

        Work that is cancelled before it begins is not run. `executor` is only asked how many threads it has.
        """
        begin = self._now + self._draw_delay()
        has_one_thread = getattr(executor, "_max_workers", 0) == 1
        if has_one_thread:
            begin = max(begin, self._busy_until.get(executor, 0.0))
        end = begin + self._draw_delay()
        if has_one_thread:
            self._busy_until[executor] = end
        future = self.create_future()
        # A thread does not know the context variables of the code that gave it work.
        context = self.context_of(self.current_owner())
        self.call_at(begin, self._work, future, func, args, end, context=context)
        return future

    def _draw_delay(self) -> float:
        return self.random.uniform(*EXECUTOR_SECONDS) * self.current_owner().slowdown

    def _work(self, future: asyncio.Future[Any], func: Any, args: Any, end: float) -> None:
        if future.cancelled():
            return
        result, error = None, None
        try:
            result = func(*args)
        except Exception as raised:  # noqa: BLE001 - it goes to whoever awaits the future
            error = raised
        self.call_at(end, self._deliver, future, result, error)

    def _deliver(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    async def getaddrinfo(self, host: Any, port: Any, **_: int) -> list[Any]:
        """Looks a name up in `names`."""
        await asyncio.sleep(self._draw_delay())
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is not in the simulation's names")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, int(port))) for address in self.names[host]]

    # Errors and debugging.

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keeps an error that nobody retrieves: it fails the run."""
        error = context.get("exception") or RuntimeError(context["message"])
        error.add_note(f"in the simulation at {self._now:.6f} s: {context['message']}")
        self.errors.append(error)

    def get_debug(self) -> bool:
        return False


def _refuse(name: str) -> Callable[..., Any]:
    def refused(*_: object, **__: object) -> Any:
        raise NotSimulated(f"the simulation has no loop.{name}: it would depend on the world outside")

    return refused


# Everything of asyncio's loops that is not above: sockets, subprocesses, signals, handlers of exceptions.
for _name, _attribute in vars(asyncio.AbstractEventLoop).items():
    if callable(_attribute) and not _name.startswith("_") and getattr(SimLoop, _name) is _attribute:
        setattr(SimLoop, _name, _refuse(_name))


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a run came to."""

    result: T
    trace_hash: str
    virtual_seconds: float
    num_callbacks: int


def run(main: Coroutine[Any, Any, T], seed: int | str = 0, max_callbacks: int = 100_000_000) -> Outcome[T]:
    """Runs a coroutine on a new loop. Raises its error, or an exception group of errors that nobody retrieved.

    To have the hash of a run that fails, or the log of its events, make a `SimLoop` and use its `run` and its `trace`.
    """
    loop = SimLoop(seed, max_callbacks)
    result = loop.run(main)
    return Outcome(result, loop.trace.hexdigest(), loop.time() - START_SECONDS, loop.num_callbacks)
