from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from blockyard.contract.sampling import Candidates
from blockyard.contract.scheduling import Abort, AbortReason, Add, Resubmission, Resume, SequenceRecord, Submission
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.live.scheduler_link import _batches
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.blockyard.contract.codec.test_request import SAMPLING
from tests.unit.gateway.harness import Front, rest_of, serving, spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gateway.live.scheduler_link import Outgoing


async def until_readiness_is(front: Front, ready: bool) -> None:
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
        await until_readiness_is(front, True)
        assert front.service.readiness_message == ""
        assert (await front.generate(spec())).choices
        await scheduler.tell_readiness(False, "a worker died")
        await until_readiness_is(front, False)
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
    monkeypatch.setattr("gateway.live.scheduler_link.START_SECONDS", 0.3)
    monkeypatch.setattr("gateway.live.scheduler_link.MAX_DELAY_SECONDS", 0.1)
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
            await until_readiness_is(front, True)
            assert (await front.generate(spec())).choices


async def test_a_broken_stream_is_opened_again_and_ends_nothing() -> None:
    async with FakeScheduler(paused=True) as scheduler, serving(scheduler) as front:
        calls = [front.stream(spec(request_id=f"r{i}", max_tokens=9)) for i in range(3)]
        for call in calls:
            await call.read()
        await scheduler.step(2)
        await scheduler.break_streams()
        await scheduler.wait_until(lambda: scheduler.num_attaches == 2)
        scheduler.go_on()
        for call in calls:
            events = await rest_of(call)
            assert events[-1].finished.usage.num_completion_tokens == 9
            # The scheduler forgot nothing.
            assert not any(event.HasField("recovered") for event in events)


async def test_the_next_scheduler_is_told_what_was_cancelled() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        await front.service.cancel(["r", "unknown"])
        assert scheduler.told_cancelled == []
        await scheduler.break_streams()
        await scheduler.wait_until(lambda: scheduler.num_attaches == 2)
        assert scheduler.told_cancelled == ["r", "unknown"]


async def test_a_scheduler_that_drains_is_dialled_again() -> None:
    async with FakeScheduler(paused=True) as scheduler, serving(scheduler) as front:
        call = front.stream(spec(max_tokens=9))
        await call.read()
        await scheduler.break_streams(BlockyardError(Reason.DRAINING, "a new version comes"))
        await scheduler.wait_until(lambda: scheduler.num_attaches == 2)
        scheduler.go_on()
        assert (await rest_of(call))[-1].HasField("finished")


async def test_a_dead_scheduler_is_found_again_on_its_address() -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        for _ in range(2):
            await scheduler.stop()
            await until_readiness_is(front, False)
            # What is known of the model stays known.
            assert [model.name for model in front.service.models()] == ["demo"]
            await scheduler.start()
            await until_readiness_is(front, True)
            assert (await front.generate(spec())).choices


async def test_a_message_that_makes_no_sense_costs_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeScheduler(paused=True) as scheduler, serving(scheduler) as front:
        call = front.stream(spec(max_tokens=9))
        await call.read()
        # A token of no sequence.
        await scheduler.send(scheduler_pb2.AttachResponse(token_ids=[1]))
        await scheduler.wait_until(lambda: scheduler.num_attaches == 2)
        scheduler.go_on()
        assert (await rest_of(call))[-1].HasField("finished")
        assert "could not be applied" in caplog.text


async def test_what_cannot_be_sent_costs_one_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = ["once"]

    def batches(outgoing: Sequence[Outgoing]) -> Iterator[scheduler_pb2.AttachRequest]:
        if broken:
            broken.pop()
            raise ValueError("a bug")
        return _batches(outgoing)

    monkeypatch.setattr("gateway.live.scheduler_link._batches", batches)
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        assert (await front.generate(spec())).choices
        assert scheduler.num_attaches == 2
        assert "the connection to the scheduler failed" in caplog.text


def add(handle: int, num_prompt_tokens: int = 1, num_tokens: int = 0) -> Add:
    submission = Submission(f"r{handle}", (300,) * num_prompt_tokens, 1, SAMPLING, 9, 0, ())
    return Add(handle, submission, Resubmission(1.0, [SequenceRecord((5,) * num_tokens)]) if num_tokens else None)


def test_what_is_sent_in_one_turn_goes_into_one_message_as_far_as_its_order_allows() -> None:
    stop = Abort(1, "r1", AbortReason.STOP_STRING, 0, 3)
    outgoing = [add(1), add(2), stop, Abort(2, "r2"), add(3), Resume(4, "x"), Abort(3, "r3"), Resume(5, "y")]
    messages = list(_batches(outgoing))
    assert [
        ([a.handle for a in m.add], [a.handle for a in m.abort], [r.handle for r in m.resume]) for m in messages
    ] == [([1, 2], [1, 2], []), ([3], [], [4]), ([], [3], [5])]


def test_the_bytes_of_a_message_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.live.scheduler_link._MAX_MESSAGE_BYTES", 1000)
    submission, best = add(0).submission, Candidates((9,) * 30, (-1.0,) * 30, (1,) * 30)
    large = {
        "prompt": add(0, 300),
        "output": add(0, 1, 600),
        "logprobs": Add(0, submission, Resubmission(1.0, [SequenceRecord((5,) * 3, logprobs=[best] * 3)])),
        "grammar": Add(0, replace(submission, sampling=replace(SAMPLING, grammar="g" * 600))),
        "state": Add(0, replace(submission, gateway_state=b"s" * 600)),
    }
    for name, item in large.items():
        messages = list(_batches([item, item, add(1), add(2, 2000)]))
        assert [[each.handle for each in message.add] for message in messages] == [[0], [0, 1], [2]], name


async def test_a_request_that_no_message_can_hold_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        for name in ("_MAX_MESSAGE_BYTES", "INTERNAL_MESSAGE_BYTES"):
            monkeypatch.setattr(f"gateway.live.scheduler_link.{name}", 1000)
        prompts = ["a", "a b" * 500, "b"]
        tasks = [asyncio.create_task(front.generate(spec(prompt))) for prompt in prompts]
        first, large, last = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert isinstance(large, grpc.aio.AioRpcError)
        assert from_rpc_error(large).reason is Reason.MESSAGE_TOO_LARGE
        assert first.choices
        assert last.choices
        assert scheduler.num_attaches == 1


async def test_an_id_can_be_cancelled_and_used_again_at_once() -> None:
    # No answer ends before it is cancelled, however late a thread of gRPC brings its beginning.
    async with FakeScheduler(max_model_len=10**9) as scheduler, serving(scheduler) as front:
        for _ in range(20):
            call = front.stream(spec(request_id="same", max_tokens=10**8))
            await call.read()
            assert (await front.service.cancel(["same"])).cancelled == ["same"]
        answer = await front.generate(spec(request_id="same", max_tokens=4, return_token_ids=True))
        seed = answer.accepted.seed
        assert answer.choices[0].token_ids == [5 + (seed + 104729 * (k + 1)) % 4000 for k in range(4)]
