"""How many requests a gateway takes at once, and what is not counted."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from blockyard.contract.request import Position
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from gateway.live.live_requests import Admission
from gateway.live.outstanding import RETRY_SECONDS
from gateway.request import GenerationRequest
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.refusals import refused
from tests.unit.gateway.core import Core
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import serving, spec


async def refusal(core: Core, request_id: str) -> BlockyardError:
    with pytest.raises(BlockyardError) as raised:
        await core.start(request_id)
    return raised.value


async def test_one_request_too_many_is_told_when_to_try_again() -> None:
    core = Core(max_requests=2)
    for name in "ab":
        await core.start(name)
    error = await refusal(core, "c")
    assert (error.reason, error.retry_after_seconds) == (Reason.QUEUE_FULL, RETRY_SECONDS)
    assert len(core.link.adds) == 2


async def test_requests_that_are_tokenized_at_once_count() -> None:
    core = Core(max_requests=2)
    long = "word " * 1500
    ends = await asyncio.gather(*(core.start(name, prompt=long) for name in "abc"), return_exceptions=True)
    # The model has no room for them, and says so of those that were looked at.
    reasons = [end.reason for end in ends if isinstance(end, BlockyardError)]
    assert reasons == [Reason.PROMPT_TOO_LONG, Reason.PROMPT_TOO_LONG, Reason.QUEUE_FULL]
    await core.start("d")


async def test_an_end_makes_room() -> None:
    core = Core(max_requests=1)
    await core.accepted("a")
    assert (await refusal(core, "b")).reason is Reason.QUEUE_FULL
    core.tokens(core.first, 5, end=FinishReason.LENGTH)
    await core.start("b")


async def test_a_request_that_is_here_can_be_sent_again_and_resumed() -> None:
    core = Core(max_requests=1)
    await core.start("a")
    await core.start("a")
    await core.resume("a")
    assert len(core.link.adds) == 1


async def test_what_a_client_has_a_part_of_goes_on_and_what_nobody_has_seen_waits_its_turn() -> None:
    core = Core(max_requests=1)
    await core.start("a")

    async def restart(name: str, position: Position) -> None:
        request = GenerationRequest(prompt=(5, 6), request_id=name)
        asking = asyncio.create_task(core.resume(name, positions={0: position}, request=request))
        # It asks the scheduler in its first turn.
        await asyncio.sleep(0)
        core.told(failed=[core.failure(core.link.resumes[-1].handle, Reason.REQUEST_EXPIRED)])
        await asking

    await restart("b", Position(2, 3, token_ids=(7, 8)))
    with pytest.raises(BlockyardError, match="QUEUE_FULL"):
        await restart("c", Position())


def test_without_a_limit_nothing_is_refused() -> None:
    admission = Admission(0, lambda: 10**6)
    with admission.beginning(is_new=True):
        pass


async def test_both_fronts_tell_it() -> None:
    async with (
        FakeScheduler(paused=True) as scheduler,
        serving(scheduler, max_requests=1) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        call = front.stream(spec())
        assert (await call.read()).event.HasField("accepted")
        error = await refused(front.stream(spec()))
        assert (error.reason, error.retry_after_seconds) == (Reason.QUEUE_FULL, RETRY_SECONDS)
        whole = await refused(front.stub.Generate(inference_pb2.GenerateRequest(spec=spec())))
        assert whole.reason is Reason.QUEUE_FULL
        answer = await http.post("/v1/completions", json={"prompt": "Hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "QUEUE_FULL")
        assert answer.headers["retry-after"] == "1"
        call.cancel()
        await front.wait_until_unread()
