from __future__ import annotations

import asyncio

import pytest

from blockyard.contract.sampling import Candidates, FinishReason, PromptPiece
from blockyard.contract.scheduling import (
    Acceptance,
    Ending,
    ModelFacts,
    Progress,
    Readiness,
    Recovery,
    Resumed,
    SequenceRecord,
    TokenUpdate,
)
from blockyard.errors import BlockyardError, Reason
from scheduler_service.gateways.outbox import GatewayOutbox

FACTS = ModelFacts("digest", 100, 64, 16, "id", True)


def tokens(*pairs: tuple[int, int]) -> TokenUpdate:
    return TokenUpdate([sequence for sequence, _ in pairs], [token for _, token in pairs])


async def take(outbox: GatewayOutbox):
    return await asyncio.wait_for(outbox.take(), 1)


async def test_steps_merge_while_nobody_takes_them() -> None:
    outbox = GatewayOutbox("a")
    outbox.put_update(tokens((1, 10), (2, 20)))
    last = tokens((1, 11))
    last.ended.append(Ending(1, FinishReason.STOP))
    last.prefilled.append((2, 16))
    outbox.put_update(last)
    outgoing = await take(outbox)
    assert outgoing.update.sequence_ids == [1, 2, 1]
    assert outgoing.update.token_ids == [10, 20, 11]
    assert outgoing.update.ended == [Ending(1, FinishReason.STOP)]
    assert outgoing.update.prefilled == [(2, 16)]


async def test_what_was_taken_is_not_told_again() -> None:
    outbox = GatewayOutbox("a")
    outbox.put_update(tokens((1, 10)))
    first = await take(outbox)
    outbox.put_update(tokens((1, 11)))
    assert first.update.token_ids == [10]
    assert (await take(outbox)).update.token_ids == [11]


async def test_an_update_is_not_shared_with_the_core() -> None:
    outbox = GatewayOutbox("a")
    update = tokens((1, 10))
    outbox.put_update(update)
    outbox.put_update(tokens((1, 11)))
    assert update.token_ids == [10]


async def test_take_waits_for_something() -> None:
    outbox = GatewayOutbox("a")
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put_accepted("r", 4)
    outgoing = await asyncio.wait_for(taking, 1)
    assert outgoing is not None
    assert outgoing.accepted == [Acceptance(0, 4, "r")]


async def test_the_newest_readiness_is_told_and_facts_stay() -> None:
    outbox = GatewayOutbox("a")
    outbox.put_state(facts=FACTS, readiness=Readiness(True))
    outbox.put_state(readiness=Readiness(False, "gone"))
    outgoing = await take(outbox)
    assert outgoing.facts == FACTS
    assert outgoing.readiness == Readiness(False, "gone")


async def test_a_recovery_comes_between_the_tokens_before_and_after_it() -> None:
    outbox, recovery = GatewayOutbox("a"), Recovery("r", "lost", 5, True)
    outbox.put_update(tokens((1, 10)))
    outbox.put_recovered([recovery])
    outbox.put_update(tokens((1, 11)))
    before, after = await take(outbox), await take(outbox)
    assert (before.update.token_ids, before.recovered) == ([10], [])
    assert (after.update.token_ids, after.recovered) == ([11], [recovery])


async def test_the_end_comes_after_what_waits() -> None:
    outbox = GatewayOutbox("a")
    outbox.put_update(tokens((1, 10)))
    outbox.close(BlockyardError(Reason.DRAINING, "bye"))
    assert (await take(outbox)).update.token_ids == [10]
    with pytest.raises(BlockyardError, match="bye"):
        await take(outbox)


async def test_a_good_end_is_none() -> None:
    outbox = GatewayOutbox("a")
    outbox.close()
    assert await take(outbox) is None


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is a short one, and what waits would do so until the test is over."""
    monkeypatch.setattr("scheduler_service.gateways.outbox.MERGE_SECONDS", 3600.0)
    monkeypatch.setattr("scheduler_service.gateways.outbox.MAX_WAIT_SECONDS", 3600.0)


async def after_a_first_message() -> tuple[GatewayOutbox, asyncio.Task[Progress | None]]:
    """A gateway that was just told tokens, and waits for more."""
    outbox = GatewayOutbox("a")
    outbox.put_update(tokens((1, 10)))
    assert (await take(outbox)).update.token_ids == [10]
    taking = asyncio.create_task(take(outbox))
    await asyncio.sleep(0)
    return outbox, taking


@pytest.mark.usefixtures("long_waits")
@pytest.mark.parametrize("event", ["end", "prefill", "acceptance", "failure", "recovery", "readiness"])
async def test_tokens_of_short_steps_wait_until_there_is_more_to_tell(event: str) -> None:
    outbox, taking = await after_a_first_message()
    outbox.put_update(tokens((1, 11)))
    outbox.put_update(tokens((1, 12)))
    await asyncio.sleep(0)
    assert not taking.done()
    last = tokens((1, 13))
    match event:
        case "end":
            last.ended.append(Ending(1, FinishReason.LENGTH))
            outbox.put_update(last)
        case "prefill":
            last.prefilled.append((2, 16))
            outbox.put_update(last)
        case "acceptance":
            outbox.put_accepted("r", 4)
        case "failure":
            outbox.put_failed("r", BlockyardError(Reason.BUG, "broken"))
        case "recovery":
            outbox.put_recovered([Recovery("r", "the worker was lost", 3, True)])
        case _:
            outbox.put_state(readiness=Readiness(False, "no worker"))
    outgoing = await taking
    assert outgoing is not None
    assert outgoing.update.token_ids[:2] == [11, 12]


@pytest.mark.usefixtures("long_waits")
async def test_tokens_that_wait_are_told_before_the_end_of_the_stream() -> None:
    outbox, taking = await after_a_first_message()
    outbox.put_update(tokens((1, 11)))
    outbox.close()
    outgoing = await taking
    assert outgoing is not None
    assert outgoing.update.token_ids == [11]
    assert await outbox.take() is None


async def test_tokens_wait_no_longer_than_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.gateways.outbox.MERGE_SECONDS", 3600.0)
    outbox, taking = await after_a_first_message()
    outbox.put_update(tokens((1, 11)))
    outgoing = await taking
    assert outgoing is not None
    assert outgoing.update.token_ids == [11]


async def test_tokens_of_long_steps_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.gateways.outbox.MERGE_SECONDS", 0.0)
    monkeypatch.setattr("scheduler_service.gateways.outbox.MAX_WAIT_SECONDS", 3600.0)
    outbox, taking = await after_a_first_message()
    outbox.put_update(tokens((1, 11)))
    outgoing = await taking
    assert outgoing is not None
    assert outgoing.update.token_ids == [11]


BEST = Candidates((9,) * 20, (-1.0,) * 20, (1,) * 20)
NONE = SequenceRecord([])
LARGE = {
    "request": Resumed(1, b"m" * 600, 1, [NONE]),
    "output": Resumed(1, b"", 1, [NONE, SequenceRecord([5] * 200)]),
    "its logprobs": Resumed(1, b"", 1, [NONE._replace(logprobs=[BEST] * 3)]),
    "its prompt's": Resumed(1, b"", 1, [NONE], 0, [PromptPiece(1, [BEST] * 3)]),
    "its numbers": Resumed(1, b"", 1, [NONE._replace(pooled_values=b"p" * 600)]),
    "logprobs": TokenUpdate([1] * 5, [5] * 5, logprobs=[(1, BEST)] * 5),
    "prompt": TokenUpdate(prompt_logprobs=[(1, PromptPiece(1, [BEST] * 5))]),
    "numbers": TokenUpdate(pooled=[(1, b"p" * 1200)]),
}


@pytest.mark.parametrize("kind", LARGE)
async def test_what_waits_for_a_gateway_is_no_larger_than_a_connection_takes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.gateways.outbox.MAX_LARGE_BYTES", 1000)
    outbox, large = GatewayOutbox("a"), LARGE[kind]
    for _ in range(3):
        if isinstance(large, Resumed):
            outbox.put_resumed(large)
        else:
            outbox.put_update(large)
    outbox.put_update(tokens((1, 10)))
    outbox.put_update(tokens((1, 11)))
    outbox.close()
    messages: list[Progress] = []
    while message := await take(outbox):
        messages.append(message)
    assert [len(each.resumed) for each in messages] == ([1, 1, 1] if isinstance(large, Resumed) else [0] * 4)
    assert messages[-1].update.token_ids == [10, 11]
