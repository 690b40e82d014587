"""A model whose scheduler or worker starts when requests wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard.errors import BlockyardError, Reason
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.request import GenerationRequest
from tests.unit.gateway.core import FACTS, HandLink
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.live.reader import Reader
    from gateway.served_model import ServedModel


class Gateway:
    """A gateway whose model never had a scheduler."""

    def __init__(self, *, max_requests: int = 0, max_wait_seconds: float = 300.0) -> None:
        self.link = HandLink()
        self.link.facts, self.link.is_ready, self.link.takes_requests = None, False, False
        self.link.message = "the scheduler does not answer"
        self.live = LiveRequests(self.link)
        self.service = GenerationService(max_requests=max_requests)
        self.model: ServedModel = self.service.add_model(
            "demo",
            demo_tokenizer(),
            self.link,
            self.live,
            starts_on_demand=True,
            max_wait_seconds=max_wait_seconds,
        )

    async def start(self, request_id: str = "r") -> Reader:
        return await self.service.start(GenerationRequest((5, 6), request_id=request_id))

    def started(self) -> None:
        """The scheduler and its worker have come."""
        self.link.facts, self.link.is_ready, self.link.takes_requests = FACTS, True, True
        self.link.changed.set()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.service.stop(BlockyardError(Reason.DRAINING, "the test is over"))


async def test_a_gateway_is_ready_without_a_scheduler_and_lists_the_model(gateway: Gateway) -> None:
    assert gateway.service.is_ready()
    [card] = gateway.service.models()
    assert (card.name, card.max_model_len, card.has_chat_template) == ("demo", 0, True)


async def test_requests_wait_for_the_first_start_and_are_counted(gateway: Gateway) -> None:
    waiting = [asyncio.ensure_future(gateway.start(f"r{number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert (gateway.model.num_waiting_here, gateway.service.num_requests, gateway.link.sent) == (2, 2, [])
    gateway.started()
    for each in waiting:
        await each
    assert len(gateway.link.adds) == 2
    assert (gateway.model.num_waiting_here, gateway.service.num_requests) == (0, 2)


async def test_requests_wait_again_once_the_scheduler_has_gone(gateway: Gateway) -> None:
    gateway.started()
    gateway.link.is_ready = gateway.link.takes_requests = False
    await gateway.start()
    assert (gateway.model.num_waiting_here, gateway.link.sent) == (1, [])


async def test_a_client_that_leaves_while_the_model_starts_is_not_counted(gateway: Gateway) -> None:
    waiting = asyncio.ensure_future(gateway.start())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert gateway.model.num_waiting_here == 0


async def test_what_does_not_start_in_time_is_an_error() -> None:
    gateway = Gateway(max_wait_seconds=0.02)
    with pytest.raises(BlockyardError, match="the scheduler does not answer") as failed:
        await gateway.start()
    assert failed.value.reason is Reason.NO_READY_WORKER
    assert gateway.model.num_waiting_here == 0


async def test_the_limit_of_requests_counts_those_that_wait_for_the_start() -> None:
    gateway = Gateway(max_requests=1)
    waiting = asyncio.ensure_future(gateway.start("first"))
    await asyncio.sleep(0)
    with pytest.raises(BlockyardError) as refused:
        await gateway.start("second")
    assert refused.value.reason is Reason.QUEUE_FULL
    gateway.started()
    await waiting
