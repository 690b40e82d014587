from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.simulation.loop import Deadlock, NotSimulated, Owner, SimLoop, TooLong, run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def loop() -> SimLoop:
    running = asyncio.get_running_loop()
    assert isinstance(running, SimLoop)
    return running


# What asyncio offers.


async def _sleeps() -> list[str]:
    order: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("day", 86400.0), ("second", 1.0), ("hour", 3600.0)):
            group.create_task(sleep(name, seconds))
    return order


def test_time_jumps_to_the_next_timer() -> None:
    outcome = run(_sleeps())
    assert outcome.result == ["second", "hour", "day"]
    assert outcome.virtual_seconds == pytest.approx(86400, abs=0.001)


async def _timeouts() -> list[str]:
    seen: list[str] = []
    for wait in (
        lambda: asyncio.wait_for(asyncio.sleep(9), 2),
        lambda: asyncio.wait_for(asyncio.Event().wait(), 3),
        lambda: asyncio.shield(asyncio.wait_for(asyncio.sleep(9), 1)),
    ):
        begin = loop().time()
        try:
            await wait()
        except TimeoutError:
            seen.append(f"{loop().time() - begin:.3f}")
    try:
        async with asyncio.timeout_at(loop().time() + 5):
            await asyncio.sleep(10)
    except TimeoutError:
        seen.append("timeout_at")
    done, pending = await asyncio.wait([asyncio.create_task(asyncio.sleep(n)) for n in (1, 5)], timeout=2)
    seen.append(f"{len(done)} {len(pending)}")
    return seen


def test_timeouts_end_waits() -> None:
    assert run(_timeouts()).result == ["2.000", "3.000", "1.000", "timeout_at", "1 1"]


async def _queues() -> list[int]:
    queue: asyncio.Queue[int] = asyncio.Queue(2)
    condition = asyncio.Condition()
    got: list[int] = []

    async def put() -> None:
        for number in range(20):
            await queue.put(number)

    async def get() -> None:
        while len(got) < 20:
            got.append(await queue.get())
            async with condition:
                condition.notify_all()

    tasks = [asyncio.create_task(put()), asyncio.create_task(get())]
    async with condition:
        await condition.wait_for(lambda: len(got) == 20)
    await asyncio.gather(*tasks)
    return got


def test_queues_and_conditions_work() -> None:
    assert run(_queues()).result == list(range(20))


def test_callbacks_of_one_owner_run_in_order() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in range(50):
            loop().call_soon(order.append, number)
        await asyncio.sleep(0)
        return order

    assert run(main()).result == list(range(50))


def test_timers_of_one_instant_fire_in_order_and_cancelled_ones_do_not() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        when = loop().time() + 1
        timers = [loop().call_at(when, order.append, number) for number in range(500)]
        for timer in timers[::2]:
            timer.cancel()
        await asyncio.sleep(2)
        return order

    assert run(main()).result == list(range(1, 500, 2))


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")


def test_contexts_are_as_in_asyncio() -> None:
    async def child(name: str) -> str:
        before = VARIABLE.get()
        VARIABLE.set(name)
        await asyncio.sleep(1)
        return f"{before}>{VARIABLE.get()}"

    async def main() -> list[str]:
        VARIABLE.set("main")
        return [*await asyncio.gather(child("a"), child("b")), VARIABLE.get()]

    assert run(main()).result == ["main>a", "main>b", "main"]


def test_generators_are_closed_when_dropped_and_at_the_end() -> None:
    closed: list[str] = []

    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(name)

    kept: list[Any] = []

    async def main() -> list[str]:
        dropped = numbers("dropped")
        await anext(dropped)
        del dropped
        await asyncio.sleep(2)
        kept.append(numbers("kept"))
        await anext(kept[0])
        return list(closed)

    assert run(main()).result == ["dropped"]
    assert closed == ["dropped", "kept"]


def test_tasks_that_are_left_are_cancelled() -> None:
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("left")

    async def main() -> None:
        kept.append(asyncio.create_task(left()))
        await asyncio.sleep(0)

    kept: list[Any] = []
    outcome = run(main())
    assert ended == ["left"]
    assert outcome.virtual_seconds < 1


def test_a_task_that_ignores_its_cancellation_fails_the_run() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        kept.append(asyncio.create_task(stubborn(), name="stubborn"))
        await asyncio.sleep(0)

    kept: list[Any] = []
    with pytest.raises(RuntimeError, match="did not end when they were cancelled: main stubborn"):
        run(main())


# Threads' work.


def test_threads_work_runs_on_the_loop_after_a_delay() -> None:
    async def main() -> tuple[int, bool, float]:
        begin = loop().time()
        thread = await asyncio.to_thread(threading.get_ident)
        return thread, thread == threading.get_ident(), loop().time() - begin

    _, same, seconds = run(main()).result
    assert same
    assert 0 < seconds < 0.01


def test_threads_errors_go_to_who_waits() -> None:
    async def main() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        run(main())


@pytest.mark.parametrize("seed", range(10))
def test_an_executor_of_one_thread_keeps_the_order(seed: int) -> None:
    async def main() -> list[str]:
        order: list[str] = []
        with ThreadPoolExecutor(1) as executor:
            futures = [loop().run_in_executor(executor, order.append, f"work {number}") for number in range(9)]
            for number, future in enumerate(futures):
                future.add_done_callback(lambda _, number=number: order.append(f"done {number}"))
            await asyncio.gather(*futures)
        return order

    order = run(main(), seed).result
    for what in ("work", "done"):
        assert [event for event in order if event.startswith(what)] == [f"{what} {number}" for number in range(9)]


def test_work_knows_the_context_variables_that_a_thread_knows() -> None:
    async def main() -> list[str]:
        VARIABLE.set("main")
        by_executor = asyncio.get_running_loop().run_in_executor(None, VARIABLE.get)
        return [await asyncio.to_thread(VARIABLE.get), await by_executor]

    assert run(main()).result == asyncio.run(main()) == ["main", "none"]


def test_names_are_looked_up_in_the_loop() -> None:
    async def main() -> list[str]:
        loop().names["workers"] = ["10.0.0.1", "10.0.0.2"]
        found = await loop().getaddrinfo("workers", 50053)
        with pytest.raises(OSError, match="other is not in"):
            await loop().getaddrinfo("other", 1)
        return [address[4] for address in found]

    assert run(main()).result == [("10.0.0.1", 50053), ("10.0.0.2", 50053)]


# What is refused.


@pytest.mark.parametrize("name", ["create_connection", "create_server", "sock_recv", "add_reader", "subprocess_exec"])
def test_the_world_outside_is_refused(name: str) -> None:
    async def main() -> None:
        getattr(loop(), name)(None)

    with pytest.raises(NotSimulated, match=name):
        run(main())


def test_signals_are_refused() -> None:
    async def main() -> None:
        loop().add_signal_handler(15, print)

    with pytest.raises(NotSimulated, match="add_signal_handler"):
        run(main())


def test_another_thread_may_not_call_the_loop() -> None:
    async def main() -> None:
        running = loop()

        def call() -> None:
            with pytest.raises(NotSimulated):
                running.call_soon_threadsafe(print)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with pytest.raises(BaseExceptionGroup) as caught:
        run(main())
    assert isinstance(caught.value.exceptions[0], NotSimulated)


def test_a_thread_that_outlives_the_run_is_refused() -> None:
    stopping = threading.Event()

    async def main() -> None:
        threading.Thread(target=stopping.wait, name="a thread of its own").start()

    try:
        with pytest.raises(NotSimulated, match="a thread of its own"):
            run(main())
    finally:
        stopping.set()


def test_the_loops_own_thread_may_use_call_soon_threadsafe() -> None:
    async def main() -> int:
        future = loop().create_future()
        loop().call_soon_threadsafe(future.set_result, 7)
        return await future

    assert run(main()).result == 7


def test_a_deadlock_names_the_tasks_that_wait() -> None:
    async def main() -> None:
        other = asyncio.create_task(asyncio.Event().wait(), name="waits for nothing")
        await other

    with pytest.raises(Deadlock, match="waits for nothing"):
        run(main())


def test_a_run_that_never_ends_is_ended() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - it is meant to spin
            await asyncio.sleep(0)

    with pytest.raises(TooLong, match="main main"):
        run(main(), max_callbacks=1000)


def test_errors_that_nobody_retrieves_fail_the_run() -> None:
    async def fail() -> None:
        raise ValueError("in a task")

    async def main() -> None:
        kept.append(asyncio.create_task(fail()))
        asyncio.create_task(fail())  # noqa: RUF006 - nobody keeps it
        loop().call_soon(int, "in a callback")
        await asyncio.sleep(1)

    kept: list[Any] = []
    with pytest.raises(BaseExceptionGroup) as caught:
        run(main())
    assert sorted(str(error) for error in caught.value.exceptions) == [
        "in a task",
        "in a task",
        "invalid literal for int() with base 10: 'in a callback'",
    ]


def test_the_mains_error_carries_those_that_nobody_retrieved() -> None:
    async def main() -> None:
        loop().call_soon(int, "x")
        await asyncio.sleep(0)
        raise KeyError("main")

    with pytest.raises(KeyError) as caught:
        run(main())
    assert "invalid literal" in caught.value.__notes__[0]


# Owners.


class Process:
    """A process that counts its turns, one a second, and remembers how it ended."""

    def __init__(self, name: str) -> None:
        self.turns = 0
        self.ended: list[str] = []
        self.owner = loop().owner(name)
        self.task = loop().spawn(self.owner, self.work())

    async def work(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.count())
                group.create_task(asyncio.Event().wait())
        finally:
            self.ended.append("finally")
            await asyncio.sleep(0)
            self.ended.append("after an await")

    async def count(self) -> None:
        while True:
            await asyncio.sleep(1)
            self.turns += 1


def test_a_killed_owner_runs_no_code() -> None:
    process: list[Process] = []

    async def main() -> int:
        process.append(Process("a"))
        await asyncio.sleep(5.5)
        loop().kill(process[0].owner)
        await asyncio.sleep(5)
        assert process[0].ended == []
        assert not process[0].task.done()
        return process[0].turns

    assert run(main()).result == 5


def test_a_task_that_is_killed_before_it_begins_leaves_no_warning() -> None:
    async def main() -> None:
        owner = loop().owner("a")
        loop().spawn(owner, asyncio.sleep(1))
        loop().kill(owner)
        await asyncio.sleep(1)

    run(main())


def test_owners_may_kill_themselves() -> None:
    async def suicide(owner: Owner, seen: list[str]) -> None:
        loop().kill(owner)
        seen.append("the rest of this step")
        await asyncio.sleep(0)
        seen.append("the next step")

    async def main() -> list[str]:
        seen: list[str] = []
        owner = loop().owner("a")
        loop().spawn(owner, suicide(owner, seen))
        await asyncio.sleep(1)
        return seen

    assert run(main()).result == ["the rest of this step"]


def test_a_frozen_owner_catches_up_when_it_thaws() -> None:
    async def main() -> list[int]:
        frozen, other = Process("frozen"), Process("other")
        await asyncio.sleep(3.5)
        loop().freeze(frozen.owner)
        await asyncio.sleep(10)
        seen = [frozen.turns, other.turns]
        loop().thaw(frozen.owner)
        await asyncio.sleep(2.25)
        return [*seen, frozen.turns, other.turns]

    assert run(main()).result == [3, 13, 6, 15]


def test_a_slow_owner_takes_longer_for_the_same_work() -> None:
    async def work() -> float:
        begin = loop().time()
        for _ in range(100):
            await asyncio.sleep(0)
        return loop().time() - begin

    async def main() -> list[float]:
        owner = loop().owner("a")
        usual = await loop().spawn(owner, work())
        loop().slow(owner, 1000.0)
        slow = await loop().spawn(owner, work())
        loop().slow(owner, 1.0)
        return [usual, slow, await loop().spawn(owner, work())]

    usual, slow, after = run(main()).result
    assert slow == pytest.approx(1000 * usual, rel=0.05)
    assert after == pytest.approx(usual, rel=0.05)


# Repetition.


async def _race() -> str:
    letters: list[str] = []

    async def write(letter: str) -> None:
        for _ in range(5):
            letters.append(letter)
            await asyncio.sleep(0)

    for letter in "abc":
        loop().spawn(loop().owner(letter), write(letter))
    await asyncio.sleep(1)
    await asyncio.to_thread(letters.append, ".")
    return "".join(letters)


def test_a_seed_repeats_and_seeds_differ() -> None:
    first, second = ([run(_race(), seed) for seed in range(20)] for _ in range(2))
    assert first == second
    assert len({outcome.trace_hash for outcome in first}) == 20
    assert len({outcome.result for outcome in first}) > 10


def test_a_hash_does_not_depend_on_when_it_is_asked_for() -> None:
    async def main() -> None:
        for number in range(10_000):
            loop().note(f"event {number}")
            if asked and number % 77 == 0:
                loop().trace.hexdigest()

    asked = False
    without = run(main()).trace_hash
    asked = True
    assert run(main()).trace_hash == without


def test_the_log_names_what_happened_even_in_a_run_that_fails() -> None:
    async def main() -> None:
        loop().spawn(loop().owner("a"), asyncio.sleep(1), name="sleeper")
        await asyncio.sleep(2)
        loop().note("the end is near")
        raise KeyError

    logs: list[list[tuple[float, str, str]]] = []
    for _ in range(2):
        simulation = SimLoop(seed=1)
        simulation.trace.log = []
        with pytest.raises(KeyError):
            simulation.run(main())
        simulation.trace.hexdigest()
        logs.append(simulation.trace.log)
    assert logs[0] == logs[1]
    assert [(round(when), *what) for when, *what in logs[0]] == [
        (1000, "main", "main"),
        (1000, "a", "sleeper"),
        (1001, "a", "_set_result_unless_cancelled"),
        (1001, "a", "sleeper"),
        (1002, "main", "_set_result_unless_cancelled"),
        (1002, "main", "main"),
        (1002, "note", "the end is near"),
        (1002, "main", "SimLoop._on_complete"),
    ]


async def _sets() -> str:
    """Iterates over sets of tasks and futures, as `TaskGroup` and `wait` do."""
    letters: list[str] = []

    async def wait(letter: str) -> None:
        try:
            await asyncio.sleep(1)
        finally:
            letters.append(letter)

    async def fail() -> None:
        raise KeyError

    try:
        async with asyncio.TaskGroup() as group:
            for letter in "abcdefghijklmnopqrstuvwxyz":
                group.create_task(wait(letter))
            await asyncio.sleep(0)
            group.create_task(fail())
    except* KeyError:
        letters.append(".")
    futures = {loop().create_future(): letter for letter in "abcdefghijklmnopqrstuvwxyz"}
    for future in futures:
        future.set_result(None)
    done, _ = await asyncio.wait(set(futures))
    return "".join(letters) + "".join(futures[future] for future in done)


@pytest.mark.parametrize("name", ["_race", "_sets"])
def test_another_process_with_another_hash_seed_repeats_a_seed(name: str) -> None:
    program = (
        "from tests.unit.kit.simulation import test_loop; "
        f"outcome = test_loop.run(test_loop.{name}(), 5); print(outcome.trace_hash, outcome.result)"
    )
    outcome = run(globals()[name](), 5)
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        answer = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        assert answer.stdout.decode().split() == [outcome.trace_hash, outcome.result]


def test_what_a_dead_process_starts_when_it_is_buried_belongs_to_no_other_loop() -> None:
    async def child() -> None: ...

    async def work() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            await asyncio.gather(child(), child())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        owner = loop.owner("process")
        loop.spawn(owner, work())
        await asyncio.sleep(1.0)
        loop.kill(owner)

    other = asyncio.new_event_loop()
    asyncio.set_event_loop(other)
    try:
        run(main())
        assert not asyncio.all_tasks(other)
    finally:
        asyncio.set_event_loop(None)
        other.close()
