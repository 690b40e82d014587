"""A gateway with several models: which of them a request goes to, and what is asked of all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard.contract.scheduling import Acceptance, Adapter, Failure, Progress
from blockyard.errors import BlockyardError, Reason
from gateway.generation import GenerationService
from gateway.live.live_requests import LiveRequests
from gateway.request import GenerationRequest, ResumeRequest
from tests.unit.gateway.core import Core, HandLink
from tests.unit.gateway.harness import demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ADAPTER = Adapter(1, "sql", "/adapters/sql", "a" * 64, 0)


class Gateway:
    """A gateway with the models "small", which has an adapter, and "large"."""

    def __init__(self) -> None:
        self.service = GenerationService(max_requests=3)
        self.links = {name: HandLink() for name in ("small", "large")}
        for name, link in self.links.items():
            self.service.add_model(name, demo_tokenizer(), link, LiveRequests(link, resume_window_seconds=0.1))
        self.links["small"].loras = {"sql": ADAPTER}

    async def start(self, model: str, request_id: str = "r") -> None:
        await self.service.start(GenerationRequest((5, 6), request_id=request_id, model=model))

    @property
    def adds(self) -> dict[str, int]:
        """The number of requests that each scheduler was sent."""
        return {name: len(link.adds) for name, link in self.links.items()}


async def turns() -> None:
    """Lets the tasks that ask several schedulers begin."""
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.service.stop(BlockyardError(Reason.DRAINING, "the test is over"))


@pytest.mark.parametrize(
    ("model", "goes_to"), [("", "small"), ("small", "small"), ("sql", "small"), ("large", "large")]
)
async def test_a_request_goes_to_the_scheduler_of_its_model(gateway: Gateway, model: str, goes_to: str) -> None:
    await gateway.start(model)
    assert gateway.adds == {"small": 0, "large": 0} | {goes_to: 1}


async def test_all_models_and_adapters_are_listed(gateway: Gateway) -> None:
    assert [card.name for card in gateway.service.models()] == ["small", "sql", "large"]


async def test_an_unknown_model_is_refused_with_the_names_of_all(gateway: Gateway) -> None:
    with pytest.raises(BlockyardError) as refused:
        await gateway.start("medium")
    [violation] = refused.value.violations
    assert violation.reason is Reason.MODEL_NOT_FOUND
    assert violation.description == "'medium' is not served; 'small', 'large' are"
    with pytest.raises(BlockyardError, match="'small', 'large' are"):
        gateway.service.resolve_model("medium")


async def test_an_id_belongs_to_one_request_of_all_models(gateway: Gateway) -> None:
    await gateway.start("small")
    with pytest.raises(BlockyardError) as refused:
        await gateway.start("large")
    assert refused.value.reason is Reason.REQUEST_ID_CONFLICT
    assert gateway.adds == {"small": 1, "large": 0}


async def test_the_limit_of_requests_is_that_of_all_models(gateway: Gateway) -> None:
    for number, model in enumerate(("small", "large", "large")):
        await gateway.start(model, f"r{number}")
    assert gateway.service.num_requests == 3
    with pytest.raises(BlockyardError) as refused:
        await gateway.start("small", "r3")
    assert refused.value.reason is Reason.QUEUE_FULL


async def test_a_request_of_another_gateway_is_found_at_the_scheduler_that_has_it(gateway: Gateway) -> None:
    submission = await Core().submission_of("theirs")
    asking = asyncio.ensure_future(gateway.service.resume(ResumeRequest("theirs")))
    await turns()
    [unknown], [known] = (link.resumes for link in gateway.links.values())
    small, large = (model.live for model in gateway.service.served_models)
    error = BlockyardError(Reason.REQUEST_EXPIRED, "unknown")
    small.on_progress(Progress(failed=[Failure(unknown.handle, error)]))
    large.on_progress(Progress(resumed=[Core().resumed(known.handle, submission, (20,))]))
    await asking
    assert (small.num_running, large.num_running) == (0, 1)
    assert (await gateway.service.find("theirs")).model == "large"


@pytest.mark.parametrize("answers", ["none knows it", "one does not answer"])
async def test_a_request_that_none_has_is_unknown_unless_a_scheduler_is_away(gateway: Gateway, answers: str) -> None:
    asking = asyncio.ensure_future(gateway.service.resume(ResumeRequest("theirs")))
    await turns()
    away = BlockyardError(Reason.NO_READY_WORKER, "the scheduler has just started")
    expired = BlockyardError(Reason.REQUEST_EXPIRED, "unknown")
    second = expired if answers == "none knows it" else away
    for model, error in zip(gateway.service.served_models, (expired, second), strict=True):
        [question] = gateway.links[model.name].resumes
        model.live.on_progress(Progress(failed=[Failure(question.handle, error)]))
    with pytest.raises(BlockyardError) as failed:
        await asking
    assert failed.value.reason is second.reason


async def test_a_cancel_reaches_all_schedulers(gateway: Gateway) -> None:
    await gateway.start("large", "here")
    gateway.links["small"].runs_elsewhere = {"there"}
    gateway.links["large"].not_heard_of = {"later"}
    answer = await gateway.service.cancel(["here", "there", "later", "never"])
    assert (sorted(answer.cancelled), list(answer.pending)) == (["here", "there"], ["later"])


async def test_a_gateway_is_ready_if_one_model_is_and_says_what_the_others_lack(gateway: Gateway) -> None:
    gateway.links["large"].is_ready, gateway.links["large"].message = False, "no worker is ready"
    service, (small, large) = gateway.service, gateway.service.served_models
    assert service.is_ready()
    assert (service.is_ready(small), service.is_ready(large)) == (True, False)
    assert service.readiness_message == "large: no worker is ready"
    gateway.links["small"].is_ready = False
    assert not service.is_ready()


async def test_draining_waits_for_the_readers_of_all_models(gateway: Gateway) -> None:
    reader = await gateway.service.start(GenerationRequest((5, 6), request_id="r", model="large"))
    waiting = asyncio.ensure_future(gateway.service.wait_until_idle())
    large = gateway.service.model_of("large")
    large.live.on_progress(Progress(accepted=[Acceptance(gateway.links["large"].adds[0].handle, 7)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.close()
    await asyncio.wait_for(waiting, 5)
