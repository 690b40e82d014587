"""What the core asks the scheduler for, and what becomes of the answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from blockyard.contract.events import Delta, Finished
from blockyard.errors import BlockyardError, Reason
from tests.unit.gateway.core import Core, passed


async def test_a_name_is_asked_for_once_and_again_when_the_scheduler_is_lost() -> None:
    core = Core()
    first, second = (asyncio.ensure_future(core.resume("mine")) for _ in range(2))
    await asyncio.sleep(0)
    assert len(core.link.resumes) == 1
    core.lost()
    core.attached()
    assert [resume.request_id for resume in core.link.resumes] == ["mine", "mine"]
    add = await core.submission_of("mine")
    core.told(resumed=[core.resumed(core.link.resumes[1].handle, add, (20,))], sequence_ids=[50], token_ids=[21])
    readers = [await first, await second]
    core.tokens(50, 22, end=core.LENGTH)
    for reader in readers:
        events = [event async for event in reader]
        assert [event.num_tokens for event in events if isinstance(event, Delta)] == [3]
        assert isinstance(events[-1], Finished)


async def test_who_asks_may_leave() -> None:
    core = Core(resume_window_seconds=0.05)
    asking = asyncio.ensure_future(core.resume("mine"))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    add = await core.submission_of("mine")
    core.told(resumed=[core.resumed(core.link.resumes[0].handle, add, (20,))])
    assert core.live.num_running == 1
    await passed(0.1)
    assert core.live.num_running == 0
    assert [abort.request_id for abort in core.link.aborts] == ["mine"]


async def test_a_question_without_a_scheduler_is_answered_in_time() -> None:
    core = Core(max_scheduler_wait_seconds=0.05)
    core.link.takes_requests, core.link.message = False, "nobody there"
    with pytest.raises(BlockyardError, match="nobody there") as raised:
        await core.resume("mine")
    assert raised.value.reason is Reason.NO_READY_WORKER
    core.attached()
    assert core.link.sent == []


async def test_what_comes_here_another_way_answers_a_question() -> None:
    for answer in ("resumed", "failed"):
        core = Core()
        asking = asyncio.ensure_future(core.resume("mine"))
        await asyncio.sleep(0)
        reader = await core.start("mine")
        handle = core.link.resumes[0].handle
        if answer == "resumed":
            core.told(resumed=[core.resumed(handle, core.link.adds[0].submission, (20,))])
        else:
            core.told(failed=[core.failure(handle, Reason.REQUEST_EXPIRED)])
        assert (await asking).state is reader.state


async def test_stopping_answers_questions() -> None:
    core = Core()
    asking = asyncio.ensure_future(core.resume("mine"))
    await asyncio.sleep(0)
    core.service.stop(BlockyardError(Reason.DRAINING, "bye"))
    with pytest.raises(BlockyardError, match="bye"):
        await asking


async def test_what_cannot_be_read_is_an_error_and_costs_no_connection() -> None:
    core = Core()
    asking = asyncio.ensure_future(core.resume("mine"))
    await asyncio.sleep(0)
    submission = replace(await core.submission_of("mine"), gateway_state=b"\x0a\xff")
    core.told(resumed=[core.resumed(core.link.resumes[0].handle, submission, ())])
    with pytest.raises(BlockyardError) as raised:
        await asking
    assert raised.value.reason is Reason.BUG
    assert core.live.num_running == 0
