"""What a client is warned of: tools whose calls nobody parses, and lengths that were cut, at every gateway alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.chat import Conversation, Message, Role, Tool, ToolChoice
from blockyard.contract.events import Accepted
from blockyard.contract.sampling import StopCriteria
from blockyard.contract.scheduling import Acceptance
from blockyard.errors import BlockyardError, Reason
from gateway.text.answer_parsing import UNKNOWN_DIALECT
from tests.unit.gateway.core import FACTS, Core

if TYPE_CHECKING:
    from gateway.live.reader import Reader

HELLO = (Message(Role.USER, "Hi"),)
ROOM = FACTS.max_model_len - 2


async def begun(core: Core, **fields: Any) -> Reader:
    reader = await core.start(**fields)
    core.told(accepted=[Acceptance(core.link.adds[-1].handle, 10)])
    return reader


async def warnings_of(reader: Reader) -> tuple[str, ...]:
    event = await anext(reader)
    assert isinstance(event, Accepted)
    return event.warnings


@pytest.mark.parametrize(
    ("conversation", "told"),
    [
        (Conversation(HELLO, tools=(Tool("f"),)), (UNKNOWN_DIALECT,)),
        (Conversation(HELLO, tools=(Tool("f"),), tool_choice=ToolChoice.NONE), ()),
        (Conversation(HELLO), ()),
    ],
)
async def test_tools_that_the_model_sees_are_warned_of(
    conversation: Conversation, told: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    core = Core()
    reader = await begun(core, prompt=conversation)
    assert await warnings_of(reader) == told
    lines = [record for record in caplog.records if record.message == "request warning"]
    assert len(lines) == len(told)


async def test_a_warning_is_told_again_at_another_gateway() -> None:
    here, there = Core(), Core()
    await here.start(prompt=Conversation(HELLO, tools=(Tool("f"),)))
    submission = here.link.adds[0].submission
    resuming = asyncio.ensure_future(there.resume("r"))
    await asyncio.sleep(0)
    there.told(resumed=[there.resumed(there.link.resumes[0].handle, submission, (9,))])
    assert await warnings_of(await resuming) == (UNKNOWN_DIALECT,)


@pytest.mark.parametrize("max_tokens", [ROOM + 1, 10**6])
async def test_a_length_that_does_not_fit_is_cut_where_the_gateway_is_to(max_tokens: int) -> None:
    core = Core(clamps_max_tokens=True)
    reader = await begun(core, stop=StopCriteria(max_tokens=max_tokens))
    (warning,) = await warnings_of(reader)
    assert core.link.adds[0].submission.max_tokens == ROOM
    assert f"{ROOM} instead of {max_tokens}" in warning


@pytest.mark.parametrize("max_tokens", [1, ROOM, None])
async def test_a_length_that_fits_stays_as_it_is(max_tokens: int | None) -> None:
    core = Core(clamps_max_tokens=True)
    reader = await begun(core, stop=StopCriteria(max_tokens=max_tokens))
    assert await warnings_of(reader) == ()
    assert core.link.adds[0].submission.max_tokens == (max_tokens or ROOM)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": (5,) * FACTS.max_model_len, "stop": StopCriteria(max_tokens=9)}, "prompt"),
        ({"stop": StopCriteria(max_tokens=0)}, "stop.max_tokens"),
        ({"stop": StopCriteria(max_tokens=5000, min_tokens=ROOM + 1)}, "stop.min_tokens"),
    ],
)
async def test_what_no_cut_mends_is_refused_still(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        await Core(clamps_max_tokens=True).start(**fields)
    assert [violation.field for violation in raised.value.violations] == [field]


async def test_without_the_setting_a_length_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BlockyardError) as raised:
        await Core().start(stop=StopCriteria(max_tokens=ROOM + 1))
    assert raised.value.reason is Reason.PROMPT_TOO_LONG


async def test_a_prompt_that_is_cut_to_leave_room_keeps_all_where_no_room_would_do() -> None:
    core = Core(clamps_max_tokens=True)
    long = tuple(range(10, 10 + 2 * FACTS.max_model_len))
    await core.start(prompt=long, truncate_prompt_tokens=-1, stop=StopCriteria(max_tokens=10**6))
    submission = core.link.adds[0].submission
    assert tuple(submission.prompt_token_ids) == long[1 - FACTS.max_model_len :]
    assert submission.max_tokens == 1
