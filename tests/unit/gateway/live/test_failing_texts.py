"""An answer whose tokens cannot be turned into text ends alone: the link to the scheduler is of all requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.sampling import FinishReason, StopCriteria
from blockyard.errors import Reason
from gateway.live.answer import MAX_UNREAD_TOKENS, SequenceAnswer
from tests.unit.gateway.core import Core

if TYPE_CHECKING:
    from gateway.live.reader import Reader

STOP = StopCriteria(stop_strings=("no such text",))


def break_text(core: Core, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the tokens of one request make no text."""
    [answer] = reader.state.answers
    whole = SequenceAnswer._advance_to

    def advance_to(self: SequenceAnswer, end: int) -> Any:
        if self is answer:
            raise ValueError("a bug")
        return whole(self, end)

    monkeypatch.setattr(SequenceAnswer, "_advance_to", advance_to)


@pytest.mark.parametrize("end", [None, FinishReason.LENGTH])
async def test_it_fails_alone(end: FinishReason | None, monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core()
    bad = await core.accepted("bad", 10, stop=STOP)
    good = await core.accepted("good", 20, stop=STOP)
    break_text(core, bad, monkeypatch)
    num_tokens = 1 if end else MAX_UNREAD_TOKENS + 2
    core.told(
        sequence_ids=[10, 20] * num_tokens,
        token_ids=[40, 41] * num_tokens,
        ended=[core.ending(sequence_id, score=0.0) for sequence_id in (10, 20)] if end else [],
    )
    assert bad.state.error is not None
    assert bad.state.error.reason is Reason.BUG
    assert core.live.num_running == (0 if end else 1)
    if end is None:
        # The scheduler is told, and the other goes on.
        assert [abort.request_id for abort in core.link.aborts] == ["bad"]
        core.tokens(20, 42, end=FinishReason.LENGTH)
    assert [event async for event in good]
