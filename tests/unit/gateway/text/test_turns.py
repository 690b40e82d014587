"""Turns: the order in which texts are worked on, who leaves whom a thread, and how much may wait."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.errors import BlockyardError, Reason
from gateway.text.turns import LONG_STEP_CHARACTERS, MAX_CHARACTERS, MAX_TENANT_CHARACTERS, SHORT_CHARACTERS, Turns
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SHORT, LONG = 4096, 8 * SHORT_CHARACTERS


class Bench:
    """Turns on which each step of a job is noted, and waits for leave."""

    def __init__(self, num_threads: int) -> None:
        self.turns = Turns(num_threads)
        self.begun: list[str] = []
        self._leave = threading.Semaphore(0)
        self.tasks: list[asyncio.Task[str]] = []

    def add(self, name: str, size: int, *, tenant: str = "", sizes: tuple[int, ...] = ()) -> asyncio.Task[str]:
        """Adds a job; `sizes`: of the steps behind its first one."""

        def steps() -> Iterator[int]:
            for number in range(len(sizes) + 1):
                self.begun.append(name)
                assert self._leave.acquire(timeout=10)
                if number < len(sizes):
                    yield sizes[number]
            return name

        task = asyncio.create_task(self.turns.run(tenant, size, steps()))  # type: ignore[arg-type]
        self.tasks.append(task)
        return task

    async def run(self, *, until_begun: int) -> list[str]:
        """Lets steps end until so many have begun; returns the names in that order."""
        await until(lambda: bool(self.begun))
        while len(self.begun) < until_begun:
            count = len(self.begun)
            self._leave.release()
            await until(functools.partial(self._have_begun, count + 1))
        return self.begun

    def _have_begun(self, count: int) -> bool:
        return len(self.begun) >= count

    async def end(self) -> list[str]:
        """Lets all steps end."""
        for _ in range(1000):
            self._leave.release()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.begun


@pytest.fixture
async def one() -> AsyncIterator[Bench]:
    bench = Bench(1)
    yield bench
    await bench.end()
    bench.turns.close()


@pytest.fixture
async def two() -> AsyncIterator[Bench]:
    bench = Bench(2)
    yield bench
    await bench.end()
    bench.turns.close()


async def begun(bench: Bench, *names: str) -> None:
    await until(lambda: bench.begun == list(names))


async def test_short_texts_go_before_long_ones_and_between_their_slices(one: Bench) -> None:
    slices = (SHORT_CHARACTERS,) * 3
    one.add("long", LONG, sizes=slices)
    one.add("longer", 2 * LONG, sizes=slices)
    await begun(one, "long")
    one.add("short", SHORT)
    one.add("shorter", SHORT // 2)
    assert await one.end() == ["long", "shorter", "short", *["long"] * 3, *["longer"] * 4]


async def test_a_long_text_is_passed_by_no_more_than_it_has_itself(one: Bench) -> None:
    one.add("first", SHORT)
    await begun(one, "first")
    one.add("long", 8 * SHORT)
    shorts = [f"short {number}" for number in range(20)]
    one.add(shorts[0], SHORT)
    for place, name in enumerate(shorts[1:], 1):
        await one.run(until_begun=place + 1)
        one.add(name, SHORT)
    order = await one.end()
    # One had begun before it came.
    assert order.index("long") <= 9


async def test_tenants_have_as_many_characters_each(one: Bench) -> None:
    for number in range(3):
        one.add(f"a{number}", LONG, tenant="a", sizes=(SHORT_CHARACTERS,) * 3)
    await begun(one, "a0")
    one.add("b", LONG, tenant="b", sizes=(SHORT_CHARACTERS,) * 2)
    order = await one.end()
    assert order[:6] == ["a0", "b", "a0", "b", "a0", "b"]


async def test_a_tenant_that_comes_later_does_not_make_up_for_its_absence(one: Bench) -> None:
    one.add("a0", LONG, tenant="a", sizes=(SHORT_CHARACTERS,) * 7)
    await one.run(until_begun=5)
    for number in range(3):
        one.add(f"b{number}", SHORT_CHARACTERS, tenant="b")
    order = await one.end()
    assert order[5:9] == ["b0", "a0", "b1", "a0"]


async def test_what_cannot_be_sliced_leaves_a_thread_to_the_others(two: Bench) -> None:
    whole = LONG_STEP_CHARACTERS + 1
    for name in ("a", "b"):
        two.add(name, LONG, sizes=(whole,))
    await until(lambda: len(two.begun) == 2)
    await two.run(until_begun=3)
    # Both have begun, and one of them is at length.
    two.add("short", SHORT)
    await two.run(until_begun=4)
    assert two.begun[3] == "short", "the second one waits until the first one is done"
    assert sorted(await two.end()) == ["a", "a", "b", "b", "short"]


async def refusal(waiting: asyncio.Task[str]) -> BlockyardError:
    with pytest.raises(BlockyardError) as raised:
        await waiting
    assert raised.value.retry_after_seconds is not None
    return raised.value


async def test_what_a_tenant_has_waiting_is_bounded_and_short_texts_apart(one: Bench) -> None:
    half = MAX_TENANT_CHARACTERS // 2
    one.add("a", half)
    one.add("b", half)
    await begun(one, "a")
    assert (await refusal(one.add("c", half))).reason is Reason.TENANT_QUOTA
    one.add("short", SHORT)
    one.add("other", half, tenant="other")
    assert sorted(await one.end()) == ["a", "b", "other", "short"]


async def test_what_all_have_waiting_is_bounded(one: Bench) -> None:
    for number in range(MAX_CHARACTERS // MAX_TENANT_CHARACTERS):
        one.add(str(number), MAX_TENANT_CHARACTERS, tenant=str(number))
    await begun(one, "0")
    assert (await refusal(one.add("last", LONG, tenant="last"))).reason is Reason.QUEUE_FULL


async def test_one_text_alone_may_have_more(one: Bench) -> None:
    await one.end()
    assert await one.add("a", 2 * MAX_TENANT_CHARACTERS) == "a"
    assert await one.add("b", 2 * MAX_TENANT_CHARACTERS) == "b", "what has ended counts no more"


async def test_who_was_cancelled_has_no_turn_and_holds_nothing(one: Bench) -> None:
    one.add("a", SHORT)
    await begun(one, "a")
    gone = one.add("gone", MAX_TENANT_CHARACTERS)
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    one.add("b", MAX_TENANT_CHARACTERS)
    assert await one.end() == ["a", "b"]


async def test_who_is_cancelled_between_steps_has_no_more_of_them(one: Bench) -> None:
    gone = one.add("gone", LONG, sizes=(SHORT,) * 5)
    await one.run(until_begun=2)
    gone.cancel()
    one.add("b", SHORT)
    assert await one.end() == ["gone", "gone", "b"]


async def test_an_error_of_a_step_is_the_callers(one: Bench) -> None:
    def steps() -> Any:
        yield SHORT
        raise BlockyardError(Reason.FIELD_INVALID, "no")

    with pytest.raises(BlockyardError, match="no"):
        await one.turns.run("", SHORT, steps())
    assert await one.turns.run("", SHORT, iter(())) is None  # type: ignore[arg-type]


async def test_what_has_not_begun_when_the_process_stops_is_to_be_asked_elsewhere(one: Bench) -> None:
    running = one.add("a", LONG, sizes=(SHORT,))
    await begun(one, "a")
    waiting = one.add("b", SHORT)
    await asyncio.sleep(0)
    one.turns.close()
    late = one.add("c", SHORT)
    await one.end()
    reasons = [task.exception().reason for task in (running, waiting, late)]  # type: ignore[union-attr]
    assert reasons == [Reason.DRAINING] * 3
    assert one.begun == ["a"]


async def test_tenants_that_have_nothing_waiting_are_forgotten(one: Bench) -> None:
    await one.end()
    for number in range(50):
        await one.add(str(number), SHORT, tenant=str(number))
    assert not one.turns._lines
