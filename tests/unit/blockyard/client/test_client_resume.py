"""Both clients over sockets that break: answers go on at the same gateway or another, told once and whole."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import AsyncClient, BlockyardError, Client, Completion, Event, Reason
from blockyard.client.retry import RetryPolicy
from tests.kit.fakes.fake_answers import Memory
from tests.kit.fakes.fake_gateway import Cut, FakeGateway, How

if TYPE_CHECKING:
    from collections.abc import Generator

POLICY = RetryPolicy(max_attempts=8, initial_delay_seconds=0.01, resume_seconds=20.0)
IMPATIENT = RetryPolicy(max_attempts=2, initial_delay_seconds=0.001, resume_seconds=0.0)
OPTIONS: dict[str, Any] = {"n": 2, "max_tokens": 3, "logprobs": 1, "prompt_logprobs": 0, "request_id": "r"}
# Accepted, log probabilities of the prompt, three deltas and an end for each of two sequences.
NUM_EVENTS = 10
TWINS = ["Client", "AsyncClient"]
STATUSES = [How.DRAINING, How.UNAVAILABLE, How.CANCELLED, How.INTERNAL, How.GAP, How.END]


@contextmanager
def gateways(number: int) -> Generator[list[FakeGateway]]:
    """The gateways of one system."""
    memory = Memory()
    with ExitStack() as stack:
        yield [stack.enter_context(FakeGateway(memory=memory).in_thread()) for _ in range(number)]


def read(twin: str, running: list[FakeGateway], policy: RetryPolicy = POLICY) -> tuple[list[Event], Completion, int]:
    """Reads an answer through one of the clients: its events, the whole, and how often it was resumed."""
    targets = [gateway.target for gateway in running]
    if twin == "Client":
        with Client(targets, retry=policy) as client, client.stream("one zwö", **OPTIONS) as stream:
            return list(stream), stream.result(), stream.num_resumes
    return asyncio.run(_read_async(targets, policy))


async def _read_async(targets: list[str], policy: RetryPolicy) -> tuple[list[Event], Completion, int]:
    async with AsyncClient(targets, retry=policy) as client, client.stream("one zwö", **OPTIONS) as stream:
        return [event async for event in stream], await stream.result(), stream.num_resumes


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[Event], Completion]:
    with gateways(1) as running:
        told, completion, num_resumes = read("Client", running)
    assert (len(told), num_resumes) == (NUM_EVENTS, 0)
    return told, completion


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("how", STATUSES)
def test_a_cut_after_any_event(undisturbed: tuple[list[Event], Completion], twin: str, how: How) -> None:
    for num_events in range(NUM_EVENTS):
        with gateways(1) as (gateway,):
            gateway.cuts.append(Cut(num_events, how))
            told, completion, num_resumes = read(twin, [gateway])
        assert (told, completion) == undisturbed
        assert num_resumes == (num_events > 0)
        assert gateway.memory.num_generated == 1


@pytest.mark.parametrize("twin", TWINS)
def test_an_answer_that_is_cut_at_each_event(undisturbed: tuple[list[Event], Completion], twin: str) -> None:
    with gateways(3) as running:
        for gateway in running:
            gateway.cuts.extend(Cut(2, how) for how in STATUSES)
        told, completion, num_resumes = read(twin, running)
    assert (told, completion) == undisturbed
    assert num_resumes >= 6


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("num_events", range(NUM_EVENTS))
def test_a_gateway_dies_for_good(undisturbed: tuple[list[Event], Completion], twin: str, num_events: int) -> None:
    with gateways(2) as running:
        first, second = running
        first.cuts.append(Cut(num_events, How.DEATH))
        told, completion, _ = read(twin, running)
    assert (told, completion) == undisturbed
    assert len(second.specs) + len(second.resumes) == 1
    assert first.memory.num_generated == 1


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("num_events", [0, 1, 2, 5, 9])
def test_everything_dies_and_comes_back_with_no_memory(
    undisturbed: tuple[list[Event], Completion], twin: str, num_events: int
) -> None:
    with gateways(2) as running:
        first, second = running
        first.cuts.append(Cut(num_events, How.DEATH))
        second.cuts.append(Cut(1, How.RESTART))
        told, completion, _ = read(twin, running)
    assert (told, completion) == undisturbed
    assert first.memory.num_generated == 2


@pytest.mark.parametrize("twin", TWINS)
def test_patience_has_an_end(twin: str) -> None:
    with gateways(2) as running:
        for gateway in running:
            gateway.cuts.append(Cut(2, How.DEATH))
        with pytest.raises(BlockyardError) as caught:
            read(twin, running, IMPATIENT)
    assert caught.value.reason is Reason.NO_READY_WORKER


@pytest.mark.parametrize("twin", TWINS)
def test_a_word_of_the_server_is_the_last(twin: str) -> None:
    with gateways(2) as running:
        running[0].cuts.append(Cut(2))
        running[1].failures.append(BlockyardError(Reason.POISON_REQUEST, "it kills workers"))
        with pytest.raises(BlockyardError, match="it kills workers"):
            read(twin, running)
        assert running[0].cancelled == []


def test_the_same_name_for_another_request_is_refused_and_its_owner_goes_on() -> None:
    with gateways(2) as (first, second), Client(first.target) as client, Client(second.target) as other:
        first.hold_after = 2
        stream = client.stream("a b", request_id="mine")
        next(stream)
        with pytest.raises(BlockyardError) as caught:
            other.generate("another", request_id="mine")
        assert caught.value.reason is Reason.REQUEST_ID_CONFLICT
        assert "mine" in first.memory.running


def test_the_same_request_again_has_the_same_answer() -> None:
    with gateways(2) as (first, second), Client(first.target) as client, Client(second.target) as other:
        assert client.generate("a b", request_id="mine") == other.generate("a b", request_id="mine")
        assert first.memory.num_generated == 1


def test_the_next_gateway_stays_in_use() -> None:
    with gateways(2) as (first, second), Client([first.target, second.target], retry=POLICY) as client:
        first.failures.append(BlockyardError(Reason.DRAINING, "going"))
        assert client.list_models()
        assert client.generate("a", max_tokens=1).text == "a"
        assert (first.specs, len(second.specs)) == ([], 1)


def test_waiting_finds_the_gateway_that_is_ready() -> None:
    with gateways(2) as (first, second), Client(f"{first.target},{second.target}") as client:
        first.ready = False
        client.wait_until_ready(timeout=10)
        client.generate("a")
        assert (first.specs, len(second.specs)) == ([], 1)
        second.ready = False
        with pytest.raises(BlockyardError, match=rf"{client.target} is not ready: it answers"):
            client.wait_until_ready(timeout=0.2)


async def test_waiting_finds_the_gateway_that_is_ready_async() -> None:
    with gateways(2) as (first, second):
        first.ready = False
        async with AsyncClient([first.target, second.target]) as client:
            assert client.target == f"{first.target},{second.target}"
            await client.wait_until_ready(timeout=10)
            await client.generate("a")
        assert (first.specs, len(second.specs)) == ([], 1)


def test_reading_what_another_process_began() -> None:
    with gateways(2) as (first, second), Client(first.target) as client, Client(second.target) as other:
        first.hold_after = 3
        stream = client.stream("a b", request_id="mine", max_tokens=2)
        next(stream)
        second.cuts.append(Cut(2))
        whole = other.resume("mine").result()
        assert (whole.text, whole.request_id) == ("a b", "mine")
        with pytest.raises(BlockyardError) as caught:
            other.resume("unknown").result()
        assert caught.value.reason is Reason.REQUEST_EXPIRED


async def test_reading_what_another_process_began_async() -> None:
    with gateways(1) as (gateway,):
        async with AsyncClient(gateway.target) as client:
            whole = await client.generate("a b", request_id="mine", return_token_ids=True)
            assert await client.resume("mine").result() == whole


def test_looking_on_leaves_the_request_alone() -> None:
    with gateways(1) as (gateway,), Client(gateway.target) as client:
        gateway.hold_after = 2
        stream = client.stream("a b", request_id="mine")
        next(stream)
        with Client(gateway.target) as other, other.resume("mine") as looking_on:
            next(looking_on)
        assert "mine" in gateway.memory.running
    assert gateway.cancelled == ["mine"]


@pytest.mark.parametrize("twin", TWINS)
def test_a_client_that_is_closed_cancels_what_it_runs(twin: str) -> None:
    with gateways(1) as (gateway,):
        gateway.hold_after = 2
        names = [f"r{number}" for number in range(5)]
        if twin == "Client":
            with Client(gateway.target) as client:
                streams = [client.stream("a", request_id=name) for name in names]
                assert all(next(stream) for stream in streams)
            assert [list(stream) for stream in streams] == [[]] * 5
        else:
            asyncio.run(_close_async(gateway.target, names))
        assert sorted(gateway.cancelled) == names


async def _close_async(target: str, names: list[str]) -> None:
    async with AsyncClient(target) as client:
        streams = [client.stream("a", request_id=name) for name in names]
        for stream in streams:
            await anext(stream)


async def test_forgetting_an_async_stream_cancels_it() -> None:
    with gateways(1) as (gateway,):
        gateway.hold_after = 2
        async with AsyncClient(gateway.target) as client:
            stream = client.stream("a", request_id="forgotten")
            await anext(stream)
            del stream
            gc.collect()
            assert await asyncio.to_thread(gateway.saw_cancel.wait, 10)
    assert gateway.cancelled == ["forgotten"]


def test_forgetting_an_async_stream_after_its_loop_is_harmless() -> None:
    with gateways(1) as (gateway,):
        gateway.hold_after = 2
        streams: list[Any] = []

        async def leave() -> None:
            client = AsyncClient(gateway.target)
            streams.append(client.stream("a"))
            await anext(streams[0])

        asyncio.run(leave())
        streams.clear()
        gc.collect()


def test_a_stream_that_takes_too_long_is_cancelled() -> None:
    with gateways(2) as (first, second), Client([first.target, second.target]) as client:
        second.hold_after = 2
        first.cuts.append(Cut(2))
        with pytest.raises(BlockyardError) as caught:
            client.stream("a", request_id="slow", timeout=0.3).result()
        assert caught.value.reason is Reason.GENERATION_DEADLINE
        # On a busy machine its time may be over before it has got to the second.
        assert first.saw_cancel.is_set() or second.saw_cancel.wait(10) or first.saw_cancel.is_set()


def test_closing_while_it_waits_for_a_gateway_ends_the_wait() -> None:
    with gateways(1) as (gateway,), Client(gateway.target) as client:
        gateway.cuts.append(Cut(1))
        stream = client.stream("a", request_id="waits")
        next(stream)
        waiting = threading.Event()
        gateway.failures.append(BlockyardError(Reason.DRAINING, "for long", retry_after_seconds=5.0))
        told: list[Event] = []

        def reader() -> None:
            waiting.set()
            told.extend(stream)

        thread = threading.Thread(target=reader)
        thread.start()
        assert waiting.wait(10)
        stream.close()
        thread.join(4)
        assert not thread.is_alive()
        assert told == []


async def test_closing_an_async_stream_while_it_waits_ends_the_wait() -> None:
    with gateways(1) as (gateway,):
        async with AsyncClient(gateway.target) as client:
            gateway.cuts.append(Cut(1))
            gateway.failures.append(BlockyardError(Reason.DRAINING, "for long", retry_after_seconds=5.0))
            stream = client.stream("a")
            reading = asyncio.create_task(anext(stream, None))
            await asyncio.sleep(0)
            stream.close()
            assert await asyncio.wait_for(reading, 4) is None


async def test_cancelling_the_task_that_waits_for_a_gateway_cancels_the_request() -> None:
    with gateways(2) as (first, second):
        first.hold_after = 2
        async with AsyncClient(first.target) as client, AsyncClient(second.target) as other:
            stream = client.stream("a", request_id="r")
            await anext(stream)
            second.failures.append(BlockyardError(Reason.DRAINING, "for long", retry_after_seconds=5.0))
            waiting = other.stream("a", request_id="r")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(waiting), 0.1)
            assert await asyncio.to_thread(second.saw_cancel.wait, 10)
            assert await anext(waiting, None) is None
            stream.close()


@pytest.mark.parametrize("twin", TWINS)
def test_a_tenant_goes_with_each_call(twin: str) -> None:
    with gateways(1) as (gateway,):
        gateway.cuts.append(Cut(2))
        if twin == "Client":
            with Client(gateway.target, tenant="team-1") as client:
                client.generate("a")
        else:
            asyncio.run(_generate_async(gateway.target))
        assert gateway.tenants == ["team-1", "team-1"]
    with pytest.raises(BlockyardError, match="tenant"):
        Client(tenant="a b")


async def _generate_async(target: str) -> None:
    async with AsyncClient(target, tenant="team-1") as client:
        await client.generate("a")
