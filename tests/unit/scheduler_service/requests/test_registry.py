"""Requests that outlive their gateway, scheduler or replica; over real sockets, against the truth of the hash."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from scheduler_service.requests import registry
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.kit.fakes.token_client import Stream, TokenClient
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]

STOP, LENGTH = sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH


async def refusal(client: TokenClient, stream: Stream) -> BlockyardError:
    with pytest.raises(BlockyardError) as caught:
        await client.result(stream)
    return caught.value


async def test_another_gateway_reads_on_what_one_left_behind(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, other = await harness.scheduler(), await harness.client("other")
    async with harness.gateway("goes") as goes:
        await goes.wait_until_ready()
        left = await goes.add("r", [1] * 20, n=2, max_tokens=300, gateway_state=b"state")
        await goes.wait_until(lambda: len(left.token_ids[1]) > 10)
    stream = await other.read_again("r", n=2)
    assert await other.result(stream) == oracle([1] * 20, 300, n=2)
    [resumed] = stream.resumed
    assert resumed.submission == left.submission
    assert 10 < len(resumed.sequences[1].token_ids) < 300
    assert stream.recovered == []
    await until_idle(server)


async def test_an_answer_is_kept_after_its_end(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    client, other = await harness.client(), await harness.client("other")
    assert await client.result(await client.add("r", [1] * 20, max_tokens=30)) == oracle([1] * 20, 30)
    stream = await other.read_again("r")
    assert await other.result(stream) == oracle([1] * 20, 30)
    assert stream.reasons == {0: LENGTH}
    assert (await refusal(other, await other.read_again("unknown"))).reason is Reason.REQUEST_EXPIRED


async def test_what_gateways_store_with_a_request_counts_for_what_is_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MAX_RETAINED_TOKENS", 1000)
    await harness.worker()
    await harness.scheduler()
    client, other = await harness.client(), await harness.client("other")
    for name, size in (("small", 100), ("large", 10_000)):
        await client.result(await client.add(name, [1] * 20, max_tokens=30, gateway_state=b"x" * size))
    assert (await refusal(other, await other.read_again("large"))).reason is Reason.REQUEST_EXPIRED


async def test_an_answer_is_not_kept_for_ever(harness: Harness, settings: Settings) -> None:
    await harness.worker()
    await harness.scheduler(settings(resume_window_seconds=0.0))
    client = await harness.client()
    await client.result(await client.add("r", [1], max_tokens=3))
    assert (await refusal(client, await client.read_again("r"))).reason is Reason.REQUEST_EXPIRED


async def test_one_id_with_one_body_is_one_request(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    first = await client.add("r", [1] * 20, max_tokens=200)
    await client.wait_until(lambda: len(first.token_ids[0]) > 5)
    second = await other.add("r", [1] * 20, max_tokens=200)
    assert await other.result(second) == await client.result(first) == oracle([1] * 20, 200)
    assert len(second.resumed) == 1
    again = await other.add("r", [1] * 20, max_tokens=200)
    assert await other.result(again) == oracle([1] * 20, 200)
    another = await other.add("r", [2] * 20, max_tokens=200)
    assert (await refusal(other, another)).reason is Reason.REQUEST_ID_CONFLICT
    assert (await other.status()).num_prompt_tokens == 20
    await until_idle(server)
    assert worker.refusals == []


async def test_a_request_runs_on_as_long_as_anybody_reads_it(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    first = await client.add("r", [1] * 20, max_tokens=300)
    await client.wait_until(lambda: first.token_ids[0])
    second = await other.read_again("r")
    await other.wait_until(lambda: second.resumed)
    await client.abort("r")
    assert await other.result(second) == oracle([1] * 20, 300)
    assert not first.is_done
    await until_idle(server)


async def test_a_reader_learns_that_another_one_ended_a_sequence(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    first = await client.add("r", [1] * 20, n=2, max_tokens=3000)
    await client.wait_until(lambda: first.token_ids[1])
    second = await other.read_again("r", n=2)
    await other.wait_until(lambda: second.resumed)
    await other.abort("r", 0, stop=True, num_tokens=1)
    await client.wait_until(lambda: first.reasons.get(0) == STOP)
    assert second.reasons == {}
    await other.abort("r", stop=True, num_tokens=1)
    await client.wait_until(lambda: first.reasons == {0: STOP, 1: STOP})
    await until_idle(server)


async def test_who_does_not_read_a_request_cannot_end_it(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    await harness.scheduler()
    client, other = await harness.client(), await harness.client("other")
    stream = await client.add("r", [1] * 20, max_tokens=100)
    await client.wait_until(lambda: stream.token_ids[0])
    await other.abort("r")
    assert await client.result(stream) == oracle([1] * 20, 100)


async def test_a_cancel_ends_a_request_for_all_who_read_it(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    first = await client.add("r", [1] * 20, max_tokens=3000)
    await client.wait_until(lambda: first.token_ids[0])
    second = await other.read_again("r")
    await other.wait_until(lambda: second.resumed)
    assert await other.cancel("r", "unknown", "r") == ["r"]
    for reader, stream in ((client, first), (other, second)):
        assert (await refusal(reader, stream)).reason is Reason.CLIENT_CANCELLED
    assert await other.cancel("r") == []
    assert (await refusal(other, await other.read_again("r"))).reason is Reason.CLIENT_CANCELLED
    await until_idle(server)


async def test_the_error_of_a_request_is_kept_for_who_comes_back(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    late = await client.add("r", [1] * 20, max_tokens=2000, remaining_time={"nanos": 200_000_000})
    assert (await refusal(client, late)).reason is Reason.GENERATION_DEADLINE
    assert (await refusal(other, await other.read_again("r"))).reason is Reason.GENERATION_DEADLINE
    # A gateway that was away when the request failed brings it back.
    assert (await refusal(other, await other.resubmit(late))).reason is Reason.GENERATION_DEADLINE
    # Who sends the request itself again has it computed.
    assert await client.result(await client.add("r", [1] * 20, max_tokens=9)) == oracle([1] * 20, 9)
    assert await other.result(await other.read_again("r")) == oracle([1] * 20, 9)
    await until_idle(server)


async def test_an_error_that_says_to_come_again_is_not_kept(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler(settings(max_num_seqs=1))
    client = await harness.client()
    long = await client.add("long", [1] * 20, max_tokens=2000)
    await client.wait_until(lambda: long.token_ids[0])
    late = await client.add("late", [2] * 20, max_queue_time={"nanos": 100_000_000})
    assert (await refusal(client, late)).reason is Reason.QUEUE_DEADLINE
    assert (await refusal(client, await client.read_again("late"))).reason is Reason.REQUEST_EXPIRED


async def test_a_gateway_that_attaches_again_ends_its_former_stream(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    await harness.scheduler()
    former = await harness.client("same")
    stream = await former.add("r", [1] * 20, max_tokens=300)
    await former.wait_until(lambda: stream.token_ids[0])
    client = await harness.client("same")
    ended = await former.wait_for_end()
    assert isinstance(ended, Exception) and from_rpc_error(ended).reason is Reason.CLIENT_CANCELLED  # type: ignore[arg-type]
    again = await client.resubmit(stream)
    assert await client.result(again) == oracle([1] * 20, 300)
    # The scheduler still had it.
    assert len(again.resumed) == 1
    assert (await client.status()).num_gateways == 1


@pytest.mark.parametrize("num_seen", [0, 1, 40])
async def test_a_new_scheduler_goes_on_behind_what_the_gateways_have(harness: Harness, num_seen: int) -> None:
    worker = await harness.worker(step_seconds=0.001)
    async with harness.running_scheduler():
        client = await harness.client()
        stream = await client.add("r", [1] * 20, n=2, max_tokens=200)
        await client.wait_until(lambda: len(stream.token_ids[1]) >= num_seen)
    stream.token_ids = [token_ids[:num_seen] for token_ids in stream.token_ids]
    # The sequences may have ended meanwhile, which this gateway has not seen either.
    stream.reasons.clear()
    successor, client = await harness.scheduler(), await harness.client()
    again = await client.resubmit(stream, age_seconds=3.0)
    assert await client.result(again) == oracle([1] * 20, 200, n=2)
    assert (again.resumed, again.recovered) == ([], [])
    await until_idle(successor)
    assert worker.refusals == []


async def test_what_ended_under_another_scheduler_is_kept_too(harness: Harness) -> None:
    await harness.worker()
    async with harness.running_scheduler():
        client = await harness.client()
        stream = await client.add("r", [1] * 20, n=2, max_tokens=9)
        await client.result(stream)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    stream.reasons[1] = STOP
    await client.resubmit(stream)
    # The other gateway's stream may be read first.
    await until(lambda: server.service.requests.find("r", 0.0) is not None)
    read = await other.read_again("r", n=2)
    assert await other.result(read) == oracle([1] * 20, 9, n=2)
    assert read.reasons == {0: LENGTH, 1: STOP}
    assert (await other.status()).num_prompt_tokens == 0
    await until_idle(server)


async def test_a_stop_string_counts_its_tokens(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, client, other = await harness.scheduler(), await harness.client(), await harness.client("other")
    stream = await client.add("r", [1] * 20, n=2, max_tokens=300)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 20)
    [request] = server.service.requests.live.values()
    await client.abort("r", 0, stop=True, num_tokens=7)
    await until(lambda: request.group.sequences[0].finish_reason is not None)
    read = await other.read_again("r", n=2)
    await other.wait_until(lambda: read.is_done)
    whole = oracle([1] * 20, 300, n=2)
    assert read.token_ids == [whole[0][:7], whole[1]]
    assert read.reasons == {0: STOP, 1: LENGTH}


async def test_a_request_that_waits_too_long_fails(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.002)
    server = await harness.scheduler(settings(max_num_seqs=1))
    client = await harness.client()
    long = await client.add("long", [1] * 20, max_tokens=2000)
    await client.wait_until(lambda: long.token_ids[0])
    late = await client.add("late", [2] * 20, max_queue_time={"nanos": 200_000_000})
    error = await refusal(client, late)
    assert (error.reason, error.retry_after_seconds) == (Reason.QUEUE_DEADLINE, 1.0)
    await client.abort("long")
    in_time = await client.add("in-time", [4] * 20, max_queue_time={"seconds": 50}, remaining_time={"seconds": 50})
    assert await client.result(in_time) == oracle([4] * 20, 8)
    assert len(server.service.admission._deadlines) == 0
    prompt = await client.add("prompt", [3] * 20, max_queue_time={"seconds": 5})
    assert await client.result(prompt) == oracle([3] * 20, 8)
    await until_idle(server)


async def test_a_request_that_runs_too_long_fails(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=2000, remaining_time={"nanos": 300_000_000})
    assert (await refusal(client, stream)).reason is Reason.GENERATION_DEADLINE
    assert 0 < len(stream.token_ids[0]) < 2000
    await until_idle(server)


async def test_who_comes_again_when_told_to_finds_a_place(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.001)
    server = await harness.scheduler(settings(max_num_seqs=1, max_waiting_requests=4))
    client = await harness.client()
    running = await client.add("running", [1] * 20, max_tokens=2000)
    await client.wait_until(lambda: running.token_ids[0])
    waiting = [await client.add(f"w{number}", [number + 2] * 20) for number in range(4)]
    away = await client.add("away", [9] * 20)
    assert (await refusal(client, away)).reason is Reason.QUEUE_FULL
    # Two places are free then, and kept for who was promised one.
    for stream in waiting[:2]:
        await client.abort(stream.request_id)
    new = await client.add("new", [8] * 20)
    assert (await refusal(client, new)).reason is Reason.QUEUE_FULL
    again = await client.add("away", [9] * 20)
    await client.wait_until(lambda: again.first_sequence_id is not None)
    await client.abort("running")
    assert await client.result(again) == oracle([9] * 20, 8)
    await until_idle(server)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_waiting_requests": 2}, Reason.QUEUE_FULL),
        ({"max_waiting_tokens": 40}, Reason.TOKEN_BACKLOG),
        ({"max_tenant_requests": 2}, Reason.TENANT_QUOTA),
    ],
)
async def test_what_is_too_much_is_sent_away(
    harness: Harness, settings: Settings, limits: dict[str, int], reason: Reason
) -> None:
    await harness.worker(step_seconds=0.001)
    server = await harness.scheduler(settings(max_num_seqs=1, **limits))
    client = await harness.client()
    running = await client.add("running", [1] * 20, max_tokens=300)
    await client.wait_until(lambda: running.token_ids[0])
    waiting = [await client.add(f"w{number}", [number + 2] * 20) for number in range(2)]
    error = await refusal(client, await client.add("away", [9] * 20))
    assert error.reason is reason
    assert error.retry_after_seconds is not None
    # One that was accepted before is not sent away.
    before = await client.resubmit(client.streams["away"])
    streams = [*enumerate(waiting, 2), (9, before)]
    for token_id, stream in streams:
        assert await client.result(stream) == oracle([token_id] * 20, 8)
    await until_idle(server)
