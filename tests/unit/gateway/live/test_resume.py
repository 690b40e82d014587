"""Requests over gRPC that outlive a connection, a gateway, a scheduler, or all of them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.events import Finished
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from gateway.live.scheduler_link import Cancelled
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.kit.refusals import refused
from tests.unit.gateway.core import Core
from tests.unit.gateway.harness import END_TOKEN, Front, ids_of, rest_of, serving, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Position = inference_pb2.Position
GenerationEvent = inference_pb2.GenerationEvent
KEEP = inference_pb2.ON_DISCONNECT_KEEP
TENANT = (("x-blockyard-tenant", "acme"),)


@asynccontextmanager
async def reader_of(scheduler: FakeScheduler, front: Front, *, is_other: bool) -> AsyncIterator[Front]:
    """The gateway that resumes: the same, or another one."""
    if is_other:
        async with serving(scheduler) as other:
            yield other
    else:
        yield front


SAME_OR_OTHER = pytest.mark.parametrize("is_other", [False, True], ids=["same gateway", "another gateway"])


def positions_of(events: list[GenerationEvent], *, with_ids: bool = False) -> list[Position]:
    """What a client has that got these events."""
    told: dict[int, Position] = {}
    for event in events:
        if event.HasField("delta"):
            position = told.setdefault(event.delta.index, Position(index=event.delta.index))
            position.num_tokens, position.num_text_bytes = event.delta.num_tokens, event.delta.num_text_bytes
            if with_ids:
                position.token_ids.extend(event.delta.token_ids)
        if event.HasField("finished"):
            told.setdefault(event.finished.index, Position(index=event.finished.index)).finished = True
    return list(told.values())


def answer_of(events: list[GenerationEvent]) -> Any:
    """What events tell in all; checks that nothing stands twice or is left out."""
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    ends: dict[int, inference_pb2.Finished] = {}
    for event in events:
        if event.HasField("delta"):
            delta = event.delta
            assert delta.index not in ends
            texts[delta.index] = texts.get(delta.index, "") + delta.text
            token_ids.setdefault(delta.index, []).extend(delta.token_ids)
            assert len(texts[delta.index].encode()) == delta.num_text_bytes
            assert not delta.token_ids or len(token_ids[delta.index]) == delta.num_tokens
        elif event.HasField("finished"):
            assert event.finished.index not in ends
            ends[event.finished.index] = event.finished
    return texts, token_ids, ends


def answer_of_texts(events: list[GenerationEvent]) -> str:
    return "".join(event.delta.text for event in events)


def many(**fields: Any) -> inference_pb2.GenerationSpec:
    """A request with several sequences, of which the first ends by a stop string."""
    return spec(
        "wörld 😀",
        **{"request_id": "mine", "n": 3, "max_tokens": 24, "return_token_ids": True, "on_disconnect": KEEP, **fields},
        stop={"stop_strings": ["deprec"]},
        sampling={"seed": 11},
    )


# Attaching again.


@SAME_OR_OTHER
async def test_an_answer_goes_on_behind_every_event(scheduler: FakeScheduler, front: Front, is_other: bool) -> None:
    whole = await front.events(many())
    expected = answer_of(whole)
    assert len(whole) > 10
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        for number in range(1, len(whole) + 1):
            rest = await rest_of(reader.resume("mine", positions=positions_of(whole[:number])))
            assert [event.seq for event in rest] == list(range(len(rest)))
            assert rest[0].accepted == whole[0].accepted
            assert answer_of(whole[:number] + rest[1:]) == expected


@SAME_OR_OTHER
async def test_a_running_answer_is_read_on(scheduler: FakeScheduler, front: Front, is_other: bool) -> None:
    scheduler.pause()
    call = front.stream(spec(request_id="mine", max_tokens=20, return_token_ids=True, on_disconnect=KEEP))
    events = [(await call.read()).event]
    await scheduler.step(3)
    while len(events) < 3:
        events.append((await call.read()).event)
    call.cancel()
    await front.wait_until_unread()
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        scheduler.go_on()
        rest = await rest_of(reader.resume("mine", positions=positions_of(events)))
    assert len(answer_of(events + rest)[1][0]) == 20
    assert scheduler.aborted == []


@SAME_OR_OTHER
async def test_several_readers_get_all_of_it(scheduler: FakeScheduler, front: Front, is_other: bool) -> None:
    scheduler.pause()
    request = many()
    first = front.stream(request)
    await first.read()
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        second = reader.stream(request)
        await second.read()
        await scheduler.step(4)
        third = reader.resume("mine")
        await third.read()
        scheduler.go_on()
        answers = [answer_of(await rest_of(call)) for call in (first, second, third)]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0][2]) == 3


async def test_an_aborted_answer_ends_with_its_last_reader(scheduler: FakeScheduler, front: Front) -> None:
    scheduler.pause()
    request = spec(request_id="mine", max_tokens=50)
    calls = []
    # One after another: they come in any order, and nothing can be resumed before it is known.
    for begin in (lambda: front.stream(request), lambda: front.stream(request), lambda: front.resume("mine")):
        calls.append(begin())
        await calls[-1].read()
    for call in calls[:2]:
        call.cancel()
    await scheduler.step()
    assert (await calls[2].read()).event.HasField("delta")
    assert scheduler.aborted == []
    calls[2].cancel()
    await scheduler.wait_until(lambda: len(scheduler.aborted) == 1)
    assert scheduler.num_sequences == 0
    assert (await refused(front.resume("mine"))).reason is Reason.REQUEST_EXPIRED


async def test_another_gateways_reader_keeps_an_aborted_answer_alive(scheduler: FakeScheduler, front: Front) -> None:
    scheduler.pause()
    request = spec(request_id="mine", max_tokens=5)
    first = front.stream(request)
    await first.read()
    async with serving(scheduler) as other:
        second = other.stream(request)
        await second.read()
        first.cancel()
        await scheduler.wait_until(lambda: len(scheduler.aborted) == 1)
        scheduler.go_on()
        assert (await rest_of(second))[-1].HasField("finished")


async def test_nobody_comes_back_in_time(scheduler: FakeScheduler) -> None:
    scheduler.pause()
    async with serving(scheduler, resume_window_seconds=0.05) as front:
        call = front.stream(spec(request_id="mine", on_disconnect=KEEP))
        await call.read()
        call.cancel()
        await scheduler.wait_until(lambda: len(scheduler.aborted) == 1)
        assert (await refused(front.resume("mine"))).reason is Reason.REQUEST_EXPIRED


async def test_an_answer_is_kept_for_the_window_only(scheduler: FakeScheduler) -> None:
    async with serving(scheduler, resume_window_seconds=0.0) as front:
        assert (await front.generate(spec(request_id="mine"))).choices
        scheduler.forget()
        assert (await refused(front.resume("mine"))).reason is Reason.REQUEST_EXPIRED


@SAME_OR_OTHER
async def test_the_same_request_again_is_the_same_answer(
    scheduler: FakeScheduler, front: Front, is_other: bool
) -> None:
    answer = await front.generate(many())
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        assert await reader.generate(many()) == answer
        error = await refused(reader.generate(many(n=2)))
        assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_CONFLICT)
    # Time is no part of what is asked, so a client that tries again may wait as long as it likes.
    patient = many()
    patient.max_queue_time.FromSeconds(5)
    assert await front.generate(patient) == answer


@SAME_OR_OTHER
async def test_log_probabilities_are_told_once(scheduler: FakeScheduler, front: Front, is_other: bool) -> None:
    request = spec(request_id="mine", max_tokens=6, sampling={"logprobs": 1, "prompt_logprobs": 1})
    whole = await front.events(request)
    kinds = [event.WhichOneof("event") for event in whole]
    assert kinds[:3] == ["accepted", "prompt_logprobs", "delta"]
    assert len(whole[1].prompt_logprobs.logprobs) == whole[0].accepted.num_prompt_tokens
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        again = await rest_of(reader.resume("mine"))
        assert again[1].prompt_logprobs == whole[1].prompt_logprobs
        rest = await rest_of(reader.resume("mine", positions=positions_of(whole[:4])))
    told = [entry for event in (*whole[:4], *rest) for entry in event.delta.logprobs]
    assert told == [entry for event in whole for entry in event.delta.logprobs]
    assert not any(event.HasField("prompt_logprobs") for event in rest)


async def test_a_beams_score_is_told_again(scheduler: FakeScheduler, front: Front) -> None:
    core = Core()
    reader = await core.accepted()
    core.tokens(10, 20)
    core.told(ended=[core.ending(10, score=-0.5)])
    finished = [event async for event in reader][-1]
    assert isinstance(finished, Finished) and finished.score == -0.5
    core.lost()
    core.attached()
    assert core.link.adds[-1].resubmission.sequences[0].score == -0.5  # type: ignore[union-attr]


# Nobody remembers.


async def test_without_a_spec_what_nobody_remembers_has_expired(front: Front) -> None:
    error = await refused(front.resume("unknown"))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, Reason.REQUEST_EXPIRED)


@pytest.mark.parametrize("with_ids", [True, False])
async def test_with_a_spec_it_is_generated_again(scheduler: FakeScheduler, front: Front, with_ids: bool) -> None:
    request = many()
    request.sampling.ClearField("seed")
    whole = await front.events(request)
    expected = answer_of(whole)
    for number in range(1, len(whole) + 1):
        scheduler.forget()
        async with serving(scheduler) as other:
            positions = positions_of(whole[:number], with_ids=with_ids)
            call = other.resume("mine", positions=positions, spec=request, seed=whole[0].accepted.seed)
            rest = await rest_of(call)
        texts, token_ids, ends = answer_of(whole[:number] + rest[1:])
        assert (texts, token_ids) == expected[:2]
        assert {index: end.reason for index, end in ends.items()} == {i: end.reason for i, end in expected[2].items()}
        add = scheduler.added[-1]
        has_tokens = any(position.num_tokens for position in positions)
        assert bool(scheduler.resubmissions) is (with_ids and has_tokens)
        scheduler.resubmissions.clear()
        assert add.digest == scheduler.added[0].digest


async def test_an_answer_whose_ids_say_that_it_has_ended_is_not_computed(
    scheduler: FakeScheduler, front: Front
) -> None:
    scheduler.script = scripted(*ids_of("a cat"), END_TOKEN)
    request = spec(request_id="mine", max_tokens=20, return_token_ids=True)
    whole = await front.events(request)
    scheduler.forget()
    scheduler.pause()
    async with serving(scheduler) as other:
        # Everything but the end had come.
        positions = positions_of(whole[:-1], with_ids=True)
        [accepted, finished] = await rest_of(other.resume("mine", positions=positions, spec=request))
        assert accepted.accepted == whole[0].accepted
        assert finished.finished.reason == sampling_pb2.FINISH_REASON_STOP
        # Whose tokens these were is not known.
        assert finished.finished.determinism_id == ""


async def test_who_was_first_to_start_it_again_is_joined(scheduler: FakeScheduler, front: Front) -> None:
    request = spec(request_id="mine", max_tokens=30, return_token_ids=True)
    whole = await front.events(request)
    scheduler.forget()
    scheduler.pause()
    async with serving(scheduler) as one, serving(scheduler) as two:
        calls = [
            one.resume("mine", positions=positions_of(whole[:5], with_ids=True), spec=request),
            two.resume("mine", positions=positions_of(whole[:9], with_ids=True), spec=request),
            two.resume("mine", positions=positions_of(whole[:3], with_ids=True), spec=request),
        ]
        for call in calls:
            assert (await call.read()).event.HasField("accepted")
        scheduler.go_on()
        for call, number in zip(calls, (5, 9, 3), strict=True):
            assert answer_of(whole[:number] + await rest_of(call))[:2] == answer_of(whole)[:2]
    assert len(scheduler.live) == 0


# Cancel, tenants, deadlines.


@SAME_OR_OTHER
async def test_a_request_is_cancelled_at_any_gateway(scheduler: FakeScheduler, front: Front, is_other: bool) -> None:
    scheduler.pause()
    calls = [front.stream(spec(request_id=f"r{number}", on_disconnect=KEEP)) for number in range(3)]
    for call in calls:
        await call.read()
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        request = inference_pb2.CancelGenerateRequest(request_ids=["r1", "unknown", "r0", "not/one"])
        assert (await reader.stub.CancelGenerate(request)).cancelled_request_ids == ["r1", "r0"]
        assert (await reader.stub.CancelGenerate(request)).cancelled_request_ids == []
    for call in calls[:2]:
        assert (await refused(call)).reason is Reason.CLIENT_CANCELLED
    assert (await refused(front.resume("r0"))).reason is Reason.REQUEST_EXPIRED
    scheduler.go_on()
    assert (await rest_of(calls[2]))[-1].HasField("finished")


async def test_a_cancel_that_no_scheduler_hears_is_pending_for_what_was_here_and_else_an_error() -> None:
    core = Core()
    core.link.unreachable = BlockyardError(Reason.NO_READY_WORKER, "gone")
    await core.accepted("a")
    # Another gateway may read it.
    assert await core.service.cancel(["a"]) == Cancelled([], ["a"])
    await core.accepted("b", 20)
    with pytest.raises(BlockyardError, match="gone"):
        await core.service.cancel(["b", "c"])


async def test_names_belong_to_tenants(scheduler: FakeScheduler, front: Front) -> None:
    whole = await front.generate(spec(request_id="mine"))
    request = inference_pb2.GenerateRequest(spec=spec(request_id="mine"))
    tenants = await front.stub.Generate(request, metadata=TENANT)
    assert tenants.accepted.request_id == "mine" and tenants.accepted.seed != whole.accepted.seed
    assert [(add.request_id, add.tenant) for add in scheduler.added] == [("mine", ""), ("acme/mine", "acme")]
    async with serving(scheduler) as other:
        for metadata, answer in ((None, whole), (TENANT, tenants)):
            call = other.stub.ResumeGenerate(inference_pb2.ResumeGenerateRequest(request_id="mine"), metadata=metadata)
            events = await rest_of(call)
            assert events[0].accepted == answer.accepted
            assert answer_of_texts(events) == answer.choices[0].text
    bad = front.stub.Generate(request, metadata=(("x-blockyard-tenant", "a/b"),))
    assert (await refused(bad)).violations[0].field == "x-blockyard-tenant"


async def test_the_deadline_of_a_call_goes_with_it_unless_it_is_kept(scheduler: FakeScheduler, front: Front) -> None:
    for number, request in enumerate((spec(), spec(on_disconnect=KEEP))):
        await front.stub.Generate(inference_pb2.GenerateRequest(spec=request), timeout=20)
        assert (scheduler.added[number].remaining_seconds is not None) is (number == 0)
    # gRPC sends such a time in tenths of a second, rounded up.
    assert 0 < (scheduler.added[0].remaining_seconds or 0) <= 20.1
    await front.generate(spec())
    assert scheduler.added[2].remaining_seconds is None
