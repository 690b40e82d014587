"""A scheduler that has just begun: what it does not know yet it may still hear of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.errors import BlockyardError, Reason, is_unknown_request
from scheduler_service.requests.reattachment import MAX_CANCELS, Reattachment
from tests.kit.oracles.token_oracle import oracle, until_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.kit.fakes.token_client import Stream, TokenClient
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]


async def refusal(client: TokenClient, stream: Stream) -> BlockyardError:
    with pytest.raises(BlockyardError) as caught:
        await client.result(stream)
    return caught.value


def test_it_lasts_from_the_moment_at_which_gateways_can_come() -> None:
    began = Reattachment(15.0)
    assert not began.is_over(1000.0)
    began.begin(1000.0)
    began.begin(1010.0)
    assert not began.is_over(1014.9)
    assert began.is_over(1015.0)
    assert Reattachment(0.0).is_over(0.0)


def test_what_is_not_known_expires_only_afterwards() -> None:
    began = Reattachment(15.0)
    began.begin(0.0)
    early, late = began.make_unknown_error("r", 1.0), began.make_unknown_error("r", 15.0)
    assert (early.reason, late.reason) == (Reason.NO_READY_WORKER, Reason.REQUEST_EXPIRED)
    assert early.retry_after_seconds is not None and late.retry_after_seconds is None
    assert is_unknown_request(early) and is_unknown_request(late)


def test_a_cancel_is_kept_for_what_is_older_than_it() -> None:
    began = Reattachment(15.0)
    began.begin(0.0)
    assert began.cancel(["a", "b"], 2.0) == ["a", "b"]
    assert began.was_cancelled("a", arrived_at=-30.0, now=3.0)
    # Two gateways may bring it.
    assert began.was_cancelled("a", arrived_at=1.0, now=4.0)
    assert not began.was_cancelled("a", arrived_at=3.0, now=3.0)
    assert not began.was_cancelled("c", arrived_at=0.0, now=3.0)
    assert began.cancel(["c"], 16.0) == []
    # Of a request that ended by it, it is kept afterwards too: a gateway that was away may bring the request.
    began.note("d", 16.0)
    assert began.was_cancelled("d", arrived_at=1.0, now=75.0)
    assert not began.was_cancelled("d", arrived_at=1.0, now=76.0)


def test_cancels_are_bounded() -> None:
    began = Reattachment(15.0)
    kept = began.cancel((str(number) for number in range(MAX_CANCELS + 5)), 0.0)
    assert len(kept) == MAX_CANCELS


async def test_who_asks_early_is_asked_to_come_again_and_finds_it(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.001)
    first = await harness.scheduler(settings(reattach_seconds=15.0))
    client, other = await harness.client(), await harness.client("other")
    stream = await client.add("r", [1] * 20, max_tokens=200)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 5)
    await first.stop()
    server = await harness.scheduler(settings(reattach_seconds=15.0))
    other, client = await harness.client("other"), await harness.client()
    told = await refusal(other, await other.read_again("r"))
    assert told.reason is Reason.NO_READY_WORKER and told.retry_after_seconds is not None
    assert is_unknown_request(told)
    again = await client.resubmit(stream, age_seconds=1.0)
    await client.wait_until(lambda: again.first_sequence_id is not None)
    assert await other.result(await other.read_again("r")) == oracle([1] * 20, 200)
    assert await client.result(again) == oracle([1] * 20, 200)
    await until_idle(server)


async def test_a_cancel_waits_for_its_request(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.001)
    first = await harness.scheduler()
    client = await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=3000)
    whole = await client.add("whole", [2] * 20, max_tokens=5)
    await client.result(whole)
    await client.wait_until(lambda: stream.token_ids[0])
    await first.stop()
    server = await harness.scheduler(settings(reattach_seconds=15.0))
    other, client = await harness.client("other"), await harness.client()
    told = await other.try_to_cancel("r", "whole", "nobody's")
    assert list(told.cancelled_request_ids) == []
    assert list(told.pending_request_ids) == ["r", "whole", "nobody's"]
    assert (await refusal(client, await client.resubmit(stream, age_seconds=5.0))).reason is Reason.CLIENT_CANCELLED
    # One that no scheduler had accepted, too; a new one of this name was not meant, nor an answer that is whole.
    waited = await client.add("nobody's", [3] * 20, max_tokens=9, age={"seconds": 5})
    assert (await refusal(client, waited)).reason is Reason.CLIENT_CANCELLED
    assert await client.result(await client.add("nobody's", [3] * 20, max_tokens=9)) == oracle([3] * 20, 9)
    kept = await client.resubmit(whole, age_seconds=5.0)
    await client.wait_until(lambda: kept.first_sequence_id is not None)
    assert await other.result(await other.read_again("whole")) == oracle([2] * 20, 5)
    await until_idle(server)


async def test_a_scheduler_is_told_what_was_cancelled_before_it(harness: Harness) -> None:
    """The scheduler that had confirmed the cancels ended before the requests' gateway heard of them."""
    await harness.worker(step_seconds=0.001)
    first, client = await harness.scheduler(), await harness.client()
    early = await client.add("early", [1] * 20, max_tokens=3000)
    late = await client.add("late", [2] * 20, max_tokens=3000)
    await client.wait_until(lambda: early.token_ids[0] and late.token_ids[0])
    await first.stop()
    server, client = await harness.scheduler(), await harness.client()
    early = await client.resubmit(early, age_seconds=9.0)
    newer = await client.add("newer", [3] * 20, max_tokens=300)
    await client.wait_until(lambda: early.first_sequence_id is not None and newer.first_sequence_id is not None)
    other = harness.gateway("other")
    other.cancelled = {"early": 5.0, "late": 5.0, "newer": 5.0}
    async with other:
        assert (await refusal(client, early)).reason is Reason.CLIENT_CANCELLED
        assert (await refusal(client, await client.resubmit(late, age_seconds=9.0))).reason is Reason.CLIENT_CANCELLED
        assert await client.result(newer) == oracle([3] * 20, 300)
    await until_idle(server)


async def test_a_cancel_holds_against_a_gateway_that_was_away(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, other = await harness.scheduler(), await harness.client("other")
    async with harness.gateway("away") as client:
        await client.wait_until_ready()
        stream = await client.add("r", [1] * 20, max_tokens=3000)
        await client.wait_until(lambda: stream.token_ids[0])
    # The gateway's stream is broken, so nobody tells it of the cancel.
    assert await other.cancel("r") == ["r"]
    client = await harness.client()
    assert (await refusal(client, await client.resubmit(stream, age_seconds=5.0))).reason is Reason.CLIENT_CANCELLED
    # A new request of this name was not meant.
    assert await client.result(await client.add("r", [3] * 20, max_tokens=9)) == oracle([3] * 20, 9)
    await until_idle(server)
