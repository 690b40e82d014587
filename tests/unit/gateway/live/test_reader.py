"""Several readers of one request, each from its own position."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.events import Accepted, Delta, Finished
from blockyard.contract.request import OnDisconnect, Position
from blockyard.contract.sampling import FinishReason, StopCriteria
from blockyard.errors import BlockyardError, Reason
from tests.unit.gateway.core import Core, passed
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of

if TYPE_CHECKING:
    from gateway.live.reader import Reader

STOP = FinishReason.STOP
TEXT = "wörld 😀 there was"


async def events_of(reader: Reader) -> list[Any]:
    return [event async for event in reader]


async def whole(core: Core) -> None:
    """An answer of which all has come."""
    await core.accepted(return_token_ids=True)
    core.tokens(10, *ids_of(TEXT), END_TOKEN, end=STOP)


async def test_each_reader_merges_what_it_has_not_read(core: Core) -> None:
    first = await core.accepted(return_token_ids=True)
    second = await core.start(return_token_ids=True)
    token_ids = ids_of(TEXT)
    deltas: list[Delta] = []
    for token_id in token_ids:
        core.tokens(10, token_id)
        event = await anext(first)
        assert isinstance(event, Delta)
        deltas.append(event)
    core.tokens(10, END_TOKEN, end=STOP)
    deltas += [event for event in await events_of(first) if isinstance(event, Delta)]
    accepted, delta, finished = await events_of(second)
    assert isinstance(accepted, Accepted) and isinstance(finished, Finished)
    assert "".join(each.text for each in deltas) == delta.text == TEXT
    assert tuple(i for each in deltas for i in each.token_ids) == delta.token_ids
    assert len(deltas) == len(token_ids) + 1


async def test_what_is_replayed_ends_where_the_position_is(core: Core) -> None:
    await whole(core)
    token_ids = (*ids_of(TEXT), END_TOKEN)
    for num_tokens in range(1, len(token_ids)):
        text = demo_tokenizer().decode(token_ids[:num_tokens]).rstrip("\ufffd")
        position = Position(num_tokens, len(text.encode()))
        reader = await core.resume("r", positions={0: position}, replay=True)
        before, after = [event for event in await events_of(reader) if isinstance(event, Delta)]
        assert (before.text, before.token_ids) == (text, token_ids[:num_tokens])
        assert (before.num_tokens, before.num_text_bytes) == (num_tokens, len(text.encode()))
        assert before.text + after.text == TEXT and before.token_ids + after.token_ids == token_ids


async def test_an_end_that_is_known_is_told_again_only_in_a_replay(core: Core) -> None:
    await whole(core)
    known = {0: Position(len(ids_of(TEXT)) + 1, len(TEXT.encode()), finished=True)}
    kinds = [type(event) for event in await events_of(await core.resume("r", positions=known))]
    assert kinds == [Accepted]
    kinds = [type(event) for event in await events_of(await core.resume("r", positions=known, replay=True))]
    assert kinds == [Accepted, Delta, Finished]


@given(st.integers(0, 30), st.integers(0, 40))
async def test_a_wrong_position_is_told_and_a_right_one_gets_the_rest(num_tokens: int, num_text_bytes: int) -> None:
    core = Core()
    await whole(core)
    try:
        reader = await core.resume("r", positions={0: Position(num_tokens, num_text_bytes)})
    except BlockyardError as error:
        assert error.reason is Reason.FIELD_INVALID
        content = TEXT.encode()
        is_within = num_text_bytes < len(content) and content[num_text_bytes] & 0xC0 == 0x80
        assert num_tokens > len(ids_of(TEXT)) + 1 or num_text_bytes > len(content) or is_within
        return
    deltas = [event for event in await events_of(reader) if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == TEXT.encode()[num_text_bytes:].decode()


async def test_a_client_with_other_tokens_is_not_told_the_rest(core: Core) -> None:
    """The answer was lost with all that knew it, and another reader brought it back, from fewer tokens."""
    await core.accepted()
    core.tokens(10, 20, 21, 22)
    reader = await core.resume("r", positions={0: Position(3, 0, token_ids=(20, 21, 22))})
    assert isinstance(await anext(reader), Accepted) and isinstance(await anext(reader), Delta)
    with pytest.raises(BlockyardError, match="differs from what was sent") as raised:
        await core.resume("r", positions={0: Position(3, 0, token_ids=(20, 99, 22))})
    assert raised.value.reason is Reason.REQUEST_EXPIRED
    ahead = await core.resume("r", positions={0: Position(4, 0, token_ids=(20, 21, 22, 99))})
    assert isinstance(await anext(ahead), Accepted)
    core.tokens(10, 23)
    with pytest.raises(BlockyardError, match="differs from what was sent"):
        await anext(ahead)


async def test_one_reader_that_leaves_does_not_disturb_the_other(core: Core) -> None:
    first = await core.accepted()
    second = await core.start()
    await first.aclose()
    assert core.link.aborts == []
    with pytest.raises(BlockyardError, match="closed"):
        await anext(first)
    core.tokens(10, 20, end=STOP)
    assert isinstance((await events_of(second))[-1], Finished)


async def test_whoever_comes_back_in_time_finds_it_running() -> None:
    core = Core(resume_window_seconds=0.05)
    await (await core.accepted(on_disconnect=OnDisconnect.KEEP)).aclose()
    reader = await core.resume("r")
    await passed(0.1)
    assert core.link.aborts == [] and core.live.num_running == 1
    await reader.aclose()
    await passed(0.1)
    assert len(core.link.aborts) == 1 and core.live.num_running == 0


async def test_what_has_failed_or_was_cancelled_is_not_kept(core: Core) -> None:
    await core.accepted("failed", 10)
    core.told(failed=[core.failure(core.link.adds[-1].handle, Reason.POISON_REQUEST)])
    await core.accepted("cancelled", 20)
    await core.service.cancel(["cancelled"])
    for request_id in ("failed", "cancelled"):
        assert core.live.find(request_id) is None


async def test_answers_that_are_whole_go_after_the_window() -> None:
    core = Core(resume_window_seconds=0.05)
    await whole(core)
    assert core.live.find("r") is not None
    await passed(0.1)
    assert core.live.find("r") is None


async def waiting(reader: Reader) -> asyncio.Task[list[Any]]:
    """Somebody who reads it to its end, and has read what there is."""
    reading = asyncio.create_task(events_of(reader))
    await passed(0)
    return reading


def is_woken(reader: Reader) -> bool:
    return reader._has_news


async def test_tokens_do_not_wake_whoever_waits_for_the_end(core: Core) -> None:
    reader = await core.accepted(return_token_ids=True)
    reader.be_patient()
    reading = await waiting(reader)
    for token_id in ids_of(TEXT):
        core.tokens(10, token_id)
        assert not is_woken(reader)
    core.tokens(10, END_TOKEN, end=STOP)
    delta, finished = await reading
    assert (delta.text, delta.token_ids) == (TEXT, (*ids_of(TEXT), END_TOKEN)[: finished.usage.num_completion_tokens])


async def test_a_failure_wakes_whoever_waits_for_the_end(core: Core) -> None:
    reader = await core.accepted()
    reader.be_patient()
    reading = await waiting(reader)
    core.tokens(10, *ids_of(TEXT))
    core.told(failed=[core.failure(core.link.adds[-1].handle, Reason.POISON_REQUEST)])
    with pytest.raises(BlockyardError) as caught:
        await reading
    assert caught.value.reason is Reason.POISON_REQUEST


async def test_a_stop_string_is_looked_for_whoever_waits(core: Core) -> None:
    reader = await core.accepted(stop=StopCriteria(max_tokens=50, stop_strings=("there",)))
    reader.be_patient()
    reading = await waiting(reader)
    for token_id in ids_of(TEXT):
        core.tokens(10, token_id)
        await passed(0)
    delta, *_ = [event for event in await reading if isinstance(event, Delta)]
    assert core.link.aborts[-1].num_tokens <= len(ids_of(TEXT))
    assert delta.text.startswith("w")
