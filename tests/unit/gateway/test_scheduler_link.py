from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from blockyard.errors import Reason, from_rpc_error
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.attachment import Abort, AbortReason, Submission
from gateway.scheduler_link import _batches
from tests.kit.fake_scheduler import FakeScheduler
from tests.unit.gateway.harness import Front, serving, spec
from tests.unit.gateway.test_codec import SAMPLING

if TYPE_CHECKING:
    from pathlib import Path


async def until(front: Front, ready: bool) -> None:
    async with asyncio.timeout(10):
        await front.link.wait_until(lambda: front.link.is_ready is ready)


async def refusal(front: Front) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await front.generate(spec())
    return raised.value


async def test_readiness_follows_the_scheduler() -> None:
    async with FakeScheduler(ready=False) as scheduler, serving(scheduler) as front:
        assert front.service.readiness_message == "the worker loads"
        await scheduler.tell_readiness(True)
        await until(front, True)
        assert front.service.readiness_message == ""
        assert (await front.generate(spec())).choices
        await scheduler.tell_readiness(False, "a worker died")
        await until(front, False)
        assert front.service.readiness_message == "a worker died"


async def test_requests_are_sent_to_a_scheduler_that_waits_for_a_worker() -> None:
    async with FakeScheduler(ready=False) as scheduler, serving(scheduler) as front:
        assert not front.link.is_ready
        assert (await front.generate(spec())).choices


async def test_another_model_is_never_served() -> None:
    async with FakeScheduler(model_digest="0" * 64) as scheduler, serving(scheduler) as front:
        assert not front.link.is_ready
        assert "different models" in front.service.readiness_message
        assert (await refusal(front)).code() is grpc.StatusCode.UNAVAILABLE


async def test_without_a_scheduler_requests_are_refused_at_once(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    scheduler.address = f"unix:{tmp_path}/nobody"
    async with serving(scheduler, attached=False) as front:
        error = from_rpc_error(await refusal(front))
        assert error.reason is Reason.NO_READY_WORKER
        assert "does not answer" in error.message


async def test_a_scheduler_that_never_comes_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.scheduler_link.START_SECONDS", 0.3)
    monkeypatch.setattr("gateway.scheduler_link.MAX_DELAY_SECONDS", 0.1)
    scheduler = FakeScheduler()
    scheduler.address = f"unix:{tmp_path}/nobody"
    attempts = 0

    def has_tried_enough() -> bool:
        nonlocal attempts
        attempts += "no scheduler" in caplog.text
        return attempts > 3

    async with serving(scheduler, attached=False) as front, asyncio.timeout(10):
        await front.link.wait_until(has_tried_enough)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message for record in warned] == ["no scheduler"]


async def test_a_gateway_may_be_there_before_its_scheduler(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    scheduler.address = f"unix:{tmp_path}/late"
    async with serving(scheduler, attached=False) as front:
        await refusal(front)
        async with scheduler:
            await until(front, True)
            assert (await front.generate(spec())).choices


async def test_a_broken_stream_ends_requests_and_is_opened_again() -> None:
    async with FakeScheduler(paused=True) as scheduler, serving(scheduler) as front:
        calls = [front.stream(spec(request_id=f"r{i}", max_tokens=9)) for i in range(3)]
        for call in calls:
            await call.read()
        await scheduler.break_streams()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            error = from_rpc_error(raised.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_READY_WORKER)
            assert error.retry_after_seconds == 1.0
        await until(front, True)
        assert scheduler.num_attaches == 2
        scheduler.go_on()
        # The same ids are free again.
        assert (await front.generate(spec(request_id="r0"))).choices


async def test_a_dead_scheduler_is_found_again_on_its_address() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        for _ in range(2):
            await scheduler.stop()
            await until(front, False)
            assert front.service.models() == []
            assert (await refusal(front)).code() is grpc.StatusCode.UNAVAILABLE
            await scheduler.start()
            await until(front, True)
            assert (await front.generate(spec())).choices


async def test_a_message_that_makes_no_sense_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeScheduler(paused=True) as scheduler, serving(scheduler) as front:
        call = front.stream(spec(max_tokens=9))
        await call.read()
        # A token of no sequence.
        await scheduler.send(scheduler_pb2.AttachResponse(token_ids=[1]))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert from_rpc_error(raised.value).reason is Reason.NO_READY_WORKER
        await until(front, True)
        assert scheduler.num_attaches == 2
        assert "could not be taken" in caplog.text


async def test_what_is_sent_in_one_turn_goes_into_one_message() -> None:
    def add(request_id: str) -> Submission:
        return Submission(request_id, (1,), 1, SAMPLING, 9, 0, ())

    stop = Abort("a", AbortReason.STOP_STRING, 0, 3)
    messages = _batches([add("a"), add("b"), stop, Abort("b"), add("b"), Abort("c")])
    assert [([a.request_id for a in m.add], [a.request_id for a in m.abort]) for m in messages] == [
        (["a", "b"], ["a", "b"]),
        (["b"], ["c"]),
    ]


def test_the_prompts_of_a_message_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.scheduler_link._MAX_PROMPT_TOKENS", 100)
    adds = [Submission(f"r{length}", (300,) * length, 1, SAMPLING, 9, 0, ()) for length in (500, 60, 40, 1, 99, 101)]
    messages = _batches(list(adds))
    assert [[len(add.prompt_token_ids) for add in message.add] for message in messages] == [
        [500],
        [60, 40],
        [1, 99],
        [101],
    ]


async def test_an_id_can_be_cancelled_and_used_again_at_once() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        for _ in range(20):
            call = front.stream(spec(request_id="same", max_tokens=1000))
            await call.read()
            assert front.service.cancel(["same"]) == ["same"]
        answer = await front.generate(spec(request_id="same", max_tokens=4, return_token_ids=True))
        seed = answer.accepted.seed
        assert answer.choices[0].token_ids == [5 + (seed + 104729 * (k + 1)) % 4000 for k in range(4)]
