from __future__ import annotations

import asyncio

import pytest

from blockyard.errors import BlockyardError, Reason
from scheduler_service.attachment import Attachment
from scheduler_service.core.output import FinishedSequence, FinishReason, OwnerUpdate
from scheduler_service.facts import ModelFacts, Readiness
from scheduler_service.gateway_codec import Recovery

FACTS = ModelFacts("digest", 100, 64, 16, "id", True)


def tokens(*pairs: tuple[int, int]) -> OwnerUpdate:
    return OwnerUpdate([sequence for sequence, _ in pairs], [token for _, token in pairs])


async def take(attachment: Attachment):
    return await asyncio.wait_for(attachment.take(), 1)


async def test_steps_merge_while_nobody_takes_them() -> None:
    attachment = Attachment("a")
    attachment.publish(tokens((1, 10), (2, 20)))
    last = tokens((1, 11))
    last.finished.append(FinishedSequence(1, FinishReason.STOP))
    last.prefilled.append((2, 16))
    attachment.publish(last)
    outgoing = await take(attachment)
    assert outgoing.update.sequence_ids == [1, 2, 1]
    assert outgoing.update.token_ids == [10, 20, 11]
    assert outgoing.update.finished == [FinishedSequence(1, FinishReason.STOP)]
    assert outgoing.update.prefilled == [(2, 16)]


async def test_what_was_taken_is_not_told_again() -> None:
    attachment = Attachment("a")
    attachment.publish(tokens((1, 10)))
    first = await take(attachment)
    attachment.publish(tokens((1, 11)))
    assert first.update.token_ids == [10]
    assert (await take(attachment)).update.token_ids == [11]


async def test_an_update_is_not_shared_with_the_core() -> None:
    attachment = Attachment("a")
    update = tokens((1, 10))
    attachment.publish(update)
    attachment.publish(tokens((1, 11)))
    assert update.token_ids == [10]


async def test_take_waits_for_something() -> None:
    attachment = Attachment("a")
    taking = asyncio.create_task(attachment.take())
    await asyncio.sleep(0)
    assert not taking.done()
    attachment.accept("r", 4)
    outgoing = await asyncio.wait_for(taking, 1)
    assert outgoing is not None
    assert outgoing.accepted == [("r", 4, 0)]


async def test_the_newest_readiness_is_told_and_facts_stay() -> None:
    attachment = Attachment("a")
    attachment.tell(facts=FACTS, readiness=Readiness(True))
    attachment.tell(readiness=Readiness(False, "gone"))
    outgoing = await take(attachment)
    assert outgoing.facts == FACTS
    assert outgoing.readiness == Readiness(False, "gone")


async def test_a_recovery_comes_between_the_tokens_before_and_after_it() -> None:
    attachment, recovery = Attachment("a"), Recovery("r", "lost", 5, True)
    attachment.publish(tokens((1, 10)))
    attachment.recover([recovery])
    attachment.publish(tokens((1, 11)))
    before, after = await take(attachment), await take(attachment)
    assert (before.update.token_ids, before.recovered) == ([10], [])
    assert (after.update.token_ids, after.recovered) == ([11], [recovery])


async def test_the_end_comes_after_what_waits() -> None:
    attachment = Attachment("a")
    attachment.publish(tokens((1, 10)))
    attachment.close(BlockyardError(Reason.DRAINING, "bye"))
    assert (await take(attachment)).update.token_ids == [10]
    with pytest.raises(BlockyardError, match="bye"):
        await take(attachment)


async def test_a_good_end_is_none() -> None:
    attachment = Attachment("a")
    attachment.close()
    assert await take(attachment) is None
