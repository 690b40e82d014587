"""A scheduler that has just begun does not know every request yet: what a gateway makes of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import Reason
from blockyard.inference.v1 import inference_pb2
from gateway.live.scheduler_link import Cancelled
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.refusals import refused
from tests.unit.gateway.harness import rest_of, serving, spec

if TYPE_CHECKING:
    from tests.unit.gateway.core import Core


async def test_a_request_that_may_come_yet_is_asked_for_later() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        scheduler.has_just_begun = True
        error = await refused(front.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(request_id="r")))
        assert error.reason is Reason.NO_READY_WORKER and error.retry_after_seconds is not None
        await rest_of(front.stream(spec(request_id="r")))
        # What the gateway has itself it tells at once.
        again = await rest_of(front.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(request_id="r")))
        assert again[-1].HasField("finished")
        assert scheduler.asked == ["r"]


async def test_a_request_that_is_told_in_full_does_not_wait() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        scheduler.has_just_begun = True
        told = inference_pb2.ResumeGenerateRequest(request_id="r", spec=spec(), seed=5)
        assert (await rest_of(front.stub.ResumeGenerate(told)))[-1].HasField("finished")


async def test_a_cancel_of_what_may_come_yet_says_so() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        scheduler.has_just_begun = True
        told = await front.stub.CancelGenerate(inference_pb2.CancelGenerateRequest(request_ids=["r"]))
        assert list(told.cancelled_request_ids) == []
        assert list(told.pending_request_ids) == ["r"]


async def test_what_ran_here_is_not_pending(core: Core) -> None:
    await core.accepted()
    core.link.not_heard_of = {"r", "other"}
    assert await core.service.cancel(["r", "other"]) == Cancelled(["r"], ["other"])


async def test_how_long_a_request_waited_for_a_scheduler_is_told(core: Core) -> None:
    core.link.takes_requests = False
    await core.start("late")
    core.attached()
    await core.start("soon")
    late, soon = core.link.adds
    assert late.age_seconds is not None and late.resubmission is None
    assert soon.age_seconds is None
