"""A model whose scheduler or worker starts when requests wait for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard.contract.models import LoadState
from blockyard.contract.scheduling import Failure, Progress
from blockyard.errors import BlockyardError, Reason
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.request import GenerationRequest, ResumeRequest
from tests.unit.gateway.core import FACTS, HandLink
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.live.reader import Reader
    from gateway.served_model import ServedModel


class Gateway:
    """A gateway whose model never had a scheduler."""

    def __init__(self, *, max_requests: int = 0, max_wait_seconds: float = 300.0) -> None:
        self.link = HandLink()
        self.link.facts, self.link.is_ready, self.link.takes_requests, self.link.is_attached = None, False, False, False
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

    def add_loaded(self, name: str) -> ServedModel:
        """Adds a model whose scheduler and worker run."""
        link = HandLink()
        return self.service.add_model(name, demo_tokenizer(), link, LiveRequests(link), starts_on_demand=True)

    def started(self) -> None:
        """The scheduler and its worker have come."""
        self.link.facts, self.link.is_ready, self.link.takes_requests = FACTS, True, True
        self.link.changed.set()


async def turns() -> None:
    """Lets the tasks that wait for a scheduler begin."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
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


async def test_a_request_that_its_client_brings_back_waits_for_the_start(gateway: Gateway) -> None:
    """Its gateway died, and its model was unloaded: no scheduler can know it, and only requests start one."""
    resume = ResumeRequest("r", request=GenerationRequest((5, 6), request_id="r"))
    waiting = asyncio.ensure_future(gateway.service.resume(resume))
    await turns()
    assert (gateway.model.num_waiting_here, gateway.link.sent) == (1, [])
    gateway.started()
    await waiting
    assert len(gateway.link.adds) == 1


async def test_a_request_is_looked_up_at_its_own_model_whatever_the_others_do(gateway: Gateway) -> None:
    large = gateway.add_loaded("large")
    request = GenerationRequest((5, 6), request_id="r", model="large")
    asking = asyncio.ensure_future(gateway.service.resume(ResumeRequest("r", request=request)))
    await turns()
    [question] = large.link.resumes
    expired = BlockyardError(Reason.REQUEST_EXPIRED, "unknown")
    large.live.on_progress(Progress(failed=[Failure(question.handle, expired)]))
    await asking
    assert (len(large.link.adds), gateway.model.num_waiting_here) == (1, 0)


async def test_what_only_its_id_is_known_of_may_be_found_once_the_model_runs(gateway: Gateway) -> None:
    with pytest.raises(BlockyardError, match="no scheduler runs for 'demo'") as failed:
        await gateway.service.resume(ResumeRequest("theirs"))
    assert failed.value.reason is Reason.NO_READY_WORKER
    assert gateway.model.num_waiting_here == 0


async def test_a_cancel_does_not_wait_for_models_that_do_not_run(gateway: Gateway) -> None:
    large = gateway.add_loaded("large")
    await gateway.service.start(GenerationRequest((5, 6), request_id="r", model="large"))
    assert (await gateway.service.cancel(["r"])).cancelled == ["r"]
    assert large.link.cancelled == ["r"]
    with pytest.raises(BlockyardError) as failed:
        await gateway.service.cancel(["theirs"])
    assert failed.value.reason is Reason.NO_READY_WORKER


async def test_a_model_that_is_not_needed_is_nothing_that_the_gateway_lacks(gateway: Gateway) -> None:
    gateway.add_loaded("large")
    assert gateway.service.readiness_message == ""


async def test_what_a_load_waits_for_is_told_until_the_model_is_ready(gateway: Gateway) -> None:
    assert gateway.model.loading == "loading demo: waiting for its scheduler"
    gateway.link.is_attached, gateway.link.message = True, "the worker is loading\nthe model: 17%"
    assert gateway.model.loading == "loading demo: the worker is loading the model: 17%"
    gateway.started()
    assert gateway.model.loading == ""
    assert not gateway.service.is_loading("demo")


async def test_a_load_is_waited_for_as_a_request_is(gateway: Gateway) -> None:
    assert gateway.model.state is LoadState.UNLOADED
    loading = asyncio.ensure_future(gateway.service.load("demo"))
    await asyncio.sleep(0)
    assert (gateway.model.state, gateway.model.message) == (LoadState.LOADING, "waiting for its scheduler")
    assert (gateway.model.num_requests, gateway.model.num_waiting_here) == (1, 1)
    gateway.link.is_attached, gateway.link.message = True, "the worker is loading the model: 17%"
    assert (gateway.model.state, gateway.model.message) == (LoadState.LOADING, "the worker is loading the model: 17%")
    gateway.started()
    assert (await loading).name == "demo"
    assert (gateway.model.state, gateway.model.num_requests, gateway.link.sent) == (LoadState.READY, 0, [])
    assert (await gateway.service.load("")).name == "demo", "it is loaded"


async def test_a_load_that_fails_ends_with_the_reason(gateway: Gateway) -> None:
    loading = asyncio.ensure_future(gateway.service.load("demo"))
    await asyncio.sleep(0)
    gateway.link.is_attached, gateway.link.needs_repair, gateway.link.message = True, True, "a shard is cut off"
    gateway.link.changed.set()
    with pytest.raises(BlockyardError, match="a shard is cut off") as failed:
        await loading
    assert failed.value.reason is Reason.NO_READY_WORKER
    assert (gateway.model.state, gateway.model.num_requests) == (LoadState.FAILED, 0)


async def test_only_a_model_that_is_served_and_started_on_demand_is_loaded(gateway: Gateway) -> None:
    with pytest.raises(BlockyardError) as refused:
        await gateway.service.load("other")
    assert [violation.reason for violation in refused.value.violations] == [Reason.MODEL_NOT_FOUND]
    link = HandLink()
    link.is_ready, link.message = False, "no worker is known"
    model = gateway.service.add_model("fixed", demo_tokenizer(), link, LiveRequests(link))
    assert model.state is LoadState.NOT_READY
    with pytest.raises(BlockyardError, match="no worker is known"):
        await gateway.service.load("fixed")
