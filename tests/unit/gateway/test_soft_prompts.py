"""Requests with a soft prompt: its virtual tokens take room, and are told apart from those of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.contract.events import Finished, PromptLogprobs
from blockyard.contract.sampling import Candidates, FinishReason, PromptPiece, SamplingParams, StopCriteria
from blockyard.contract.scheduling import Adapter, Ending, Prefill
from blockyard.errors import BlockyardError
from tests.unit.gateway.core import FACTS

if TYPE_CHECKING:
    from tests.unit.gateway.core import Core

SOFT = Adapter(5, "soft", "/adapters/soft", "0" * 64, num_virtual_tokens=20)
ROOM = FACTS.max_model_len - 20


@pytest.fixture(autouse=True)
def loaded(core: Core) -> None:
    core.link.loras["soft"] = SOFT


@pytest.mark.parametrize(("num_cached", "told"), [(16, 0), (20, 0), (21, 1)])
async def test_an_answer_tells_them_apart(core: Core, num_cached: int, told: int) -> None:
    asked = SamplingParams(prompt_logprobs=0)
    generation = await core.accepted(model="soft", prompt=(5, 6, 7), sampling=asked)
    submission = core.link.adds[0].submission
    assert (list(submission.prompt_token_ids), submission.lora) == ([5, 6, 7], SOFT)
    pieces = [(10, PromptPiece(20 + place, [Candidates([5 + place], [-1.0], [1])])) for place in (2, 1)]
    core.told(prefilled=[Prefill(10, num_cached)], prompt_logprobs=pieces)
    core.told(sequence_ids=[10], token_ids=[20], ended=[Ending(10, FinishReason.LENGTH)])
    events = [event async for event in generation]
    [scores] = [event for event in events if isinstance(event, PromptLogprobs)]
    assert [each.chosen and each.chosen.token_id for each in scores.logprobs] == [None, 6, 7]
    finished = events[-1]
    assert isinstance(finished, Finished)
    usage = finished.usage
    counts = usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_virtual_tokens
    assert counts == (3, told, 20)


async def test_they_take_room(core: Core) -> None:
    assert [(card.name, card.max_model_len) for card in core.service.models()] == [("demo", 1024), ("soft", ROOM)]
    await core.start("fits", model="soft", prompt=(5,) * 1000, stop=StopCriteria(max_tokens=ROOM - 1000))
    with pytest.raises(BlockyardError, match=f"maximum context length is {ROOM} tokens"):
        await core.start("long", model="soft", prompt=(5,) * 1000, stop=StopCriteria(max_tokens=ROOM - 999))
    cut = {"prompt": (5,) * 2000, "truncate_prompt_tokens": -1, "stop": StopCriteria(max_tokens=4)}
    for model, room in (("soft", ROOM), ("", 1024)):
        await core.start(f"cut-{model}", model=model, **cut)
        assert len(core.link.adds[-1].submission.prompt_token_ids) == room - 4
