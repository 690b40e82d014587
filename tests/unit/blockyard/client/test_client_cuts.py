"""Both clients through a network that cuts their connections at any byte, whatever stands there."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient, Client
from blockyard.client.retry import RetryPolicy
from tests.kit.chaos.fault_proxy import FaultProxy
from tests.kit.chaos.faulty_connection import Direction, EndAt, Ending, Rule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from blockyard import Completion
    from tests.kit.fakes.fake_gateway import FakeGateway

# Every connection ends before so many bytes: in its greeting, in a request, in the midst of an answer.
MAX_BYTES = {Direction.UP: 600, Direction.DOWN: 6000}
NUM_STREAMS = 6
MAX_TOKENS = 60
PATIENT = RetryPolicy(max_attempts=100, initial_delay_seconds=0.01, max_delay_seconds=0.05)


def cuts(seed: int) -> Callable[[int], Rule]:
    draws = random.Random(seed)

    def rule_of(_: int) -> Rule:
        direction = draws.choice(list(Direction))
        return Rule(end_at=EndAt(direction, draws.randrange(MAX_BYTES[direction]), draws.choice(list(Ending))))

    return rule_of


def prompt(number: int) -> str:
    return f"é {number} {'x' * number} 漢字"


async def read_async(target: str) -> list[Completion]:
    async with AsyncClient(target, retry=PATIENT) as client:
        reading = (client.generate(prompt(number), max_tokens=MAX_TOKENS, n=2) for number in range(NUM_STREAMS))
        return await asyncio.gather(*reading)


def read_one(target: str, number: int) -> Completion:
    with Client(target, retry=PATIENT) as client:
        return client.generate(prompt(number), max_tokens=MAX_TOKENS, n=2)


async def read_sync(target: str) -> list[Completion]:
    return await asyncio.gather(*(asyncio.to_thread(read_one, target, number) for number in range(NUM_STREAMS)))


def texts(completions: list[Completion]) -> list[list[str]]:
    return [[choice.text for choice in completion.choices] for completion in completions]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("read", [read_async, read_sync])
async def test_any_byte_may_be_the_last(
    async_gateway: FakeGateway, read: Callable[[str], Awaitable[list[Completion]]], seed: int
) -> None:
    whole = texts(await read_async(async_gateway.target))
    async with FaultProxy(async_gateway.target, rule_of=cuts(seed)) as proxy:
        assert texts(await read(proxy.address)) == whole
        assert sum(proxy.stats.num_endings.values()) >= 3
    assert async_gateway.memory.num_generated == 2 * NUM_STREAMS
