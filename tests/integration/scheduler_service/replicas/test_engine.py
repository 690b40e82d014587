"""The engine between a gateway and a worker, all over real sockets; the worker's model is a hash: the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service.config import SchedulerConfiguration
from tests.kit.oracles.token_oracle import VOCAB, oracle, until_idle
from tests.kit.waiting import until

if TYPE_CHECKING:
    from tests.unit.scheduler_service.conftest import Harness

Settings = Callable[..., SchedulerConfiguration]
LENGTH = sampling_pb2.FINISH_REASON_LENGTH
STOP = sampling_pb2.FINISH_REASON_STOP


def prompts(count: int, seed: int = 1, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


async def test_streams_complete_with_the_tokens_of_the_model(harness: Harness) -> None:
    worker, server, client = await harness.worker(), await harness.scheduler(), await harness.client()
    asked = {f"r{number}": prompt for number, prompt in enumerate(prompts(30))}
    streams = [await client.add(name, prompt, max_tokens=5 + len(prompt)) for name, prompt in asked.items()]
    for stream, prompt in zip(streams, asked.values(), strict=True):
        assert await client.result(stream) == oracle(prompt, 5 + len(prompt))
        assert stream.reasons == {0: LENGTH}
        assert stream.num_cached_tokens is not None
    assert worker.refusals == []
    await until_idle(server)


async def test_facts_and_readiness_come_first(harness: Harness) -> None:
    await harness.worker(vocab_size=77, max_model_len=300)
    await harness.scheduler()
    client = await harness.client()
    assert client.facts == scheduler_pb2.ModelFacts(
        model_digest="0" * 64,
        vocab_size=77,
        max_model_len=300,
        block_size=16,
        determinism_id="hash",
        batch_invariant=True,
        max_num_seqs=256,
        task=pooling_pb2.TASK_GENERATE,
    )
    late = await harness.client("late")
    assert late.facts == client.facts
    assert late.num_messages == 1


async def test_several_samples_of_one_prompt(harness: Harness) -> None:
    await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    prompt = list(range(20))
    stream = await client.add("r", prompt, n=3, max_tokens=20)
    token_ids = await client.result(stream)
    assert token_ids == oracle(prompt, 20, n=3)
    assert len(set(map(tuple, token_ids))) == 3
    assert stream.reasons == dict.fromkeys(range(3), LENGTH)
    await until_idle(server)


@pytest.mark.parametrize("strict", [True, False])
async def test_a_stop_token_ends_a_sequence_after_min_tokens(harness: Harness, strict: bool) -> None:
    await harness.worker(strict=strict)
    server, client = await harness.scheduler(), await harness.client()
    prompt = [5, 6, 7]
    [free] = oracle(prompt, 30)
    stops = frozenset({free[3], free[10]})
    for min_tokens in (0, 8):
        [expected] = oracle(prompt, 30, stop=stops, min_tokens=min_tokens)
        stream = await client.add(
            f"r{min_tokens}", prompt, max_tokens=30, min_tokens=min_tokens, stop_token_ids=sorted(stops)
        )
        assert await client.result(stream) == [expected]
        assert stream.reasons == {0: STOP if expected[-1] in stops else LENGTH}
        assert len(expected) > min_tokens
    await until_idle(server)


@pytest.mark.parametrize(
    "changes",
    [
        {"preemption_mode": "swap", "num_host_blocks": 200},
        {"preemption_mode": "recompute", "num_host_blocks": 0},
        {"max_prefill_chunk": 7},
        {"enable_prefix_caching": False},
        {"num_host_blocks": 10, "max_prefill_chunk": 9, "max_num_batched_tokens": 64, "max_num_seqs": 16},
    ],
    ids=lambda changes: "-".join(changes),
)
async def test_any_way_gives_the_same_tokens(harness: Harness, settings: Settings, changes: dict[str, object]) -> None:
    worker = await harness.worker()
    server = await harness.scheduler(settings(num_device_blocks=24, block_size=8, **changes))
    client = await harness.client()
    head = list(range(24))
    asked = [(head + prompt if number % 2 else prompt) for number, prompt in enumerate(prompts(24, longest=30))]
    streams = [
        await client.add(f"r{number}", prompt, n=1 + number % 3, max_tokens=20) for number, prompt in enumerate(asked)
    ]
    for stream, prompt in zip(streams, asked, strict=True):
        assert await client.result(stream) == oracle(prompt, 20, stream.n)
    assert worker.refusals == []
    await until_idle(server)
    status = await client.status()
    replica = status.replicas[0]
    if changes.get("preemption_mode"):
        assert status.num_preemptions > 0
    if changes.get("preemption_mode") == "swap":
        assert replica.num_swapped_out_blocks > 0
        assert replica.num_swapped_in_blocks > 0
    if changes.get("preemption_mode") == "recompute":
        assert replica.num_recomputed_sequences > 0
        assert replica.num_swapped_out_blocks == 0
    if "max_prefill_chunk" in changes:
        assert replica.num_prefill_pieces > 2 * len(asked)
    assert (status.num_cached_tokens > 0) == changes.get("enable_prefix_caching", True)
    assert status.num_completion_tokens == 20 * sum(stream.n for stream in streams)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_models_with_states_give_the_same_tokens(harness: Harness, settings: Settings, mode: str) -> None:
    """The worker refuses a step from another state than that of the tokens before it."""
    worker = await harness.worker(num_state_blocks=3)
    changes = {"num_device_blocks": 40, "block_size": 8, "state_snapshot_tokens": 8, "num_host_blocks": 200}
    server = await harness.scheduler(settings(**changes, preemption_mode=mode, speculation="auto"))
    client = await harness.client()
    head = list(range(24))
    asked = [(head + prompt if number % 2 else prompt) for number, prompt in enumerate(prompts(24, longest=30))]
    streams = [
        await client.add(f"r{number}", prompt, n=1 + number % 3, max_tokens=20) for number, prompt in enumerate(asked)
    ]
    for stream, prompt in zip(streams, asked, strict=True):
        assert await client.result(stream) == oracle(prompt, 20, stream.n)
    assert worker.refusals == []
    await until_idle(server)
    status = await client.status()
    assert status.num_preemptions > 0
    assert (status.replicas[0].num_swapped_in_blocks > 0) == (mode == "swap")
    for name in ("once", "again"):
        stream = await client.add(name, [*head, 1, 2, 3])
        await client.result(stream)
    assert stream.num_cached_tokens == 24
    (plan,) = worker.plans
    assert (plan.num_state_blocks, plan.max_draft_tokens) == (3, 0)


async def test_what_never_fits_is_told_with_what_would(harness: Harness, settings: Settings) -> None:
    await harness.worker()
    await harness.scheduler(settings(num_device_blocks=5, max_model_len=64))
    client = await harness.client()
    stream = await client.add("r", [1] * 64, max_tokens=10)
    with pytest.raises(BlockyardError, match="64") as caught:
        await client.result(stream)
    assert caught.value.reason is Reason.NEVER_FITS
    assert await client.result(await client.add("fits", [1] * 60, max_tokens=4)) == oracle([1] * 60, 4)


async def test_a_live_id_is_refused_and_a_finished_one_is_free(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.005)
    await harness.scheduler()
    first, second = await harness.client("first"), await harness.client("second")
    running = await first.add("same", [1, 2], max_tokens=1000)
    await first.wait_until(lambda: running.token_ids[0])
    with pytest.raises(BlockyardError) as caught:
        await second.result(await second.add("same", [3], max_tokens=2))
    assert caught.value.reason is Reason.REQUEST_ID_CONFLICT
    await first.abort("same")
    # What a gateway sends is read in order: this one is accepted after the abort.
    await first.result(await first.add("barrier", [4], max_tokens=1))
    assert await second.result(await second.add("same", [3], max_tokens=2)) == oracle([3], 2)
    assert worker.refusals == []


async def test_a_gateway_cannot_end_anothers_request(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    first, second = await harness.client("first"), await harness.client("second")
    running = await first.add("mine", [1, 2], max_tokens=40)
    await first.wait_until(lambda: running.token_ids[0])
    with pytest.raises(BlockyardError):
        await second.result(await second.add("mine", [7]))
    await second.abort("mine")
    assert await second.result(await second.add("other", [3], max_tokens=2)) == oracle([3], 2)
    assert await first.result(running) == oracle([1, 2], 40)


async def test_what_no_gateway_should_send_fails_alone(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    client = await harness.client()
    with pytest.raises(BlockyardError) as caught:
        await client.result(await client.add("empty", []))
    assert caught.value.reason is Reason.FIELD_INVALID
    assert await client.result(await client.add("good", [1])) == oracle([1], 8)


async def test_an_aborted_request_frees_its_blocks_and_is_not_told_of(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 100, n=2, max_tokens=2000)
    await client.wait_until(lambda: len(stream.token_ids[1]) > 3)
    await client.abort("r")
    await until_idle(server)
    assert not stream.reasons
    assert stream.error is None
    assert worker.refusals == []


async def test_one_sequence_ends_by_a_stop_string_and_its_siblings_go_on(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [4, 2], n=3, max_tokens=60)
    await client.wait_until(lambda: stream.token_ids[1])
    await client.abort("r", 1, stop=True)
    await client.wait_until(lambda: len(stream.reasons) == 2)
    assert stream.reasons == {0: LENGTH, 2: LENGTH}
    expected = oracle([4, 2], 60, n=3)
    assert (stream.token_ids[0], stream.token_ids[2]) == (expected[0], expected[2])
    assert stream.token_ids[1] == expected[1][: len(stream.token_ids[1])]
    await until_idle(server)


async def test_an_unknown_abort_is_no_error(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    client = await harness.client()
    await client.abort("nobody")
    await client.abort("nobody", 5)
    assert await client.result(await client.add("r", [1])) == oracle([1], 8)


async def test_what_a_gateway_leaves_behind_ends_after_a_while(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.001)
    server = await harness.scheduler(settings(resume_window_seconds=0.1))
    stays = await harness.client("stays")
    async with harness.gateway("goes") as goes:
        await goes.wait_until_ready()
        lost = await goes.add("lost", [1] * 50, n=4, max_tokens=3000)
        kept = await stays.add("kept", [2] * 50, max_tokens=60)
        await goes.wait_until(lambda: lost.token_ids[3])
    assert await stays.result(kept) == oracle([2] * 50, 60)
    await until_idle(server)
    assert (await stays.status()).num_gateways == 1


async def test_a_gateway_that_closes_its_side_is_let_go(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1], max_tokens=500)
    await client.wait_until(lambda: stream.token_ids[0])
    await client.call.done_writing()
    assert await client.wait_for_end() is None
    await until_idle(server)


async def test_steps_merge_for_a_slow_gateway_and_nothing_is_lost(harness: Harness, settings: Settings) -> None:
    await harness.worker(num_device_blocks=6000, strict=False)
    server = await harness.scheduler(settings(debug_integrity=False))
    slow, quick = await harness.client("slow", window_bytes=1024), await harness.client("quick")
    streams = [await slow.add(f"s{number}", [number], n=4, max_tokens=400) for number in range(40)]
    await slow.wait_until(lambda: all(stream.token_ids[3] for stream in streams))
    slow.pause()
    num_read = slow.num_messages
    await until_idle(server)
    num_steps = server.service.engines[0].step_loop.step_log.num_steps
    # Nobody else waits for it.
    assert await quick.result(await quick.add("q", [1], max_tokens=20)) == oracle([1], 20)
    slow.resume()
    for number, stream in enumerate(streams):
        assert await slow.result(stream) == oracle([number], 400, n=4)
    assert slow.num_messages < num_steps - 20, f"{slow.num_messages - num_read} messages for {num_steps} steps"


async def test_what_no_gateway_can_be_told_at_once_is_told_to_none(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.worker()
    await harness.scheduler()
    first, second = await harness.client("first"), await harness.client("second")
    assert await first.result(await first.add("large", [1] * 150)) == oracle([1] * 150, 8)
    assert await first.result(await first.add("small", [2])) == oracle([2], 8)
    monkeypatch.setattr("scheduler_service.gateways.outbox.INTERNAL_MESSAGE_BYTES", 200)
    large, small = await second.read_again("large"), await second.read_again("small")
    await second.wait_until(lambda: small.resumed and large.error)
    assert large.error.reason is Reason.MESSAGE_TOO_LARGE
    assert second.end is None


async def test_a_gateway_that_dies_in_the_middle_of_a_write_is_noticed(harness: Harness, settings: Settings) -> None:
    await harness.worker(num_device_blocks=6000, strict=False)
    server = await harness.scheduler(settings(debug_integrity=False, resume_window_seconds=0.0))
    watcher = await harness.client("watcher")
    async with harness.gateway("hangs", window_bytes=1024) as hangs:
        await hangs.wait_until_ready()
        streams = [await hangs.add(f"h{number}", [number], n=16, max_tokens=3000) for number in range(8)]
        await hangs.wait_until(lambda: all(stream.token_ids[15] for stream in streams))
        hangs.pause()
        # By then far more is written than fits on the way.
        await watcher.result(await watcher.add("w", [1], max_tokens=300))
    await until_idle(server)


async def test_a_thousand_cancels_leave_nothing_behind(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.0005)
    server = await harness.scheduler(settings(num_device_blocks=120, num_host_blocks=60, debug_integrity=False))
    client = await harness.client()
    rng = random.Random(3)
    live: list[str] = []
    for number in range(1000):
        name = f"r{number}"
        await client.add(name, [rng.randrange(VOCAB)] * rng.randrange(1, 90), n=rng.choice([1, 1, 3]), max_tokens=300)
        live.append(name)
        while len(live) > rng.randrange(1, 60):
            await client.abort(live.pop(rng.randrange(len(live))))
    for name in live:
        await client.abort(name)
    last = await client.add("last", [9], max_tokens=12)
    assert await client.result(last) == oracle([9], 12)
    assert worker.refusals == []
    await until_idle(server)
    scheduler = server.service.engines[0].scheduler
    assert scheduler is not None
    scheduler.check_integrity()
    for name, stream in client.streams.items():
        prompt_tokens = stream.token_ids
        assert stream.error is None, name
        assert all(len(token_ids) < 300 for token_ids in prompt_tokens)


async def test_the_next_step_waits_at_the_worker_while_one_runs(harness: Harness) -> None:
    worker = await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    await client.result(await client.add("first", [7], max_tokens=1))
    await until_idle(server)
    device = worker.devices[0]
    num_before = device.num_submitted
    device.gate.clear()
    stream = await client.add("r", [1], max_tokens=10)
    await until(lambda: device.num_submitted == num_before + 2)
    assert stream.token_ids == [[]]
    [stats] = server.service.stats()
    assert stats.num_steps_in_flight == 2
    device.gate.set()
    assert await client.result(stream) == oracle([1], 10)


async def test_the_status_tells_of_everything(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client = await harness.client()
    stream = await client.add("r", [1] * 40, max_tokens=400)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 3)
    status = await client.status()
    (replica,) = status.replicas
    assert (replica.ready, replica.epoch, status.num_gateways) == (True, 1, 1)
    assert replica.step_id >= 3
    assert replica.num_running_sequences == 1
    assert replica.device_blocks.num_blocks == 999
    # The steps in flight, two at most, may have taken the next block.
    num_tokens = 40 + replica.num_completion_tokens
    num_blocks = {-(-(num_tokens + ahead) // replica.block_size) for ahead in (0, 1, 2)}
    assert replica.device_blocks.num_blocks - replica.device_blocks.num_free_blocks in num_blocks
    assert (replica.host_blocks.num_blocks, replica.host_blocks.num_free_blocks) == (100, 100)
    assert status.num_prompt_tokens == 40
    (told,) = replica.workers
    assert told.address == worker.address
    assert (told.worker_id, told.incarnation) == ("fake", worker.incarnation)
    assert told.device == "none"


async def test_a_stream_without_hello_is_refused(harness: Harness) -> None:
    await harness.scheduler()
    async with grpc.aio.insecure_channel(harness.configuration.service.scheduler_address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Attach()
        await call.write(scheduler_pb2.AttachRequest())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
