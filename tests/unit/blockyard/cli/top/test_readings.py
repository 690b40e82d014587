"""What happened between two readings of a status, and numbers as a person reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.admin.v1 import admin_pb2
from blockyard.cli import units
from blockyard.cli.top.readings import (
    Rates,
    ReplicaRates,
    find_rates,
    find_replica_rates,
    find_start,
    replica_state,
    used_share,
    worker_state,
)
from blockyard.common.v1 import status_pb2
from tests.kit.fakes.fake_admin import advance, make_status

GIB = 1 << 30


def later(status: admin_pb2.GetStatusResponse, seconds: float) -> admin_pb2.GetStatusResponse:
    told = admin_pb2.GetStatusResponse()
    told.CopyFrom(status)
    advance(told, seconds)
    return told


@pytest.mark.parametrize("seconds", [0.5, 1.0, 10.0])
def test_rates_are_a_second_whatever_the_interval(seconds: float) -> None:
    before = make_status()
    now = later(before, seconds)
    rates = find_rates(before, now)
    assert (rates.completion_tokens, rates.prompt_tokens, rates.steps) == pytest.approx((1000, 5000, 400))
    assert rates.cached_share == pytest.approx(0.5)
    assert rates.time_to_first_token == pytest.approx(0.042)
    assert rates.inter_token_latency == pytest.approx(0.0081)
    assert rates.request_latency is None
    replica = find_replica_rates(before, now, 0)
    assert (replica.steps, replica.tokens, replica.busy_share) == pytest.approx((400, 1000, 0.8))


def test_drafts_are_told_where_there_are_some() -> None:
    before = make_status()
    now = later(before, 2)
    assert (find_rates(before, now).draft_tokens, find_rates(before, now).right_share) == (0, None)
    now.scheduler.replicas[0].num_draft_tokens += 1000
    now.scheduler.replicas[0].num_accepted_tokens += 500
    rates = find_rates(before, now)
    assert (rates.draft_tokens, rates.right_share) == pytest.approx((500, 0.5))
    # Of 2,000 tokens all but 500 had a step of their own.
    assert rates.tokens_per_step == pytest.approx(2000 / 1500)


def test_one_reading_has_no_rates() -> None:
    assert find_rates(None, make_status()) == Rates()
    assert find_replica_rates(None, make_status(), 0) == ReplicaRates()


def test_a_scheduler_that_was_restarted_counts_anew() -> None:
    before = later(make_status(), 100)
    assert find_rates(before, make_status()) == Rates()
    assert find_replica_rates(before, make_status(), 0) == ReplicaRates()


def test_a_gateway_that_was_restarted_has_no_latencies() -> None:
    before = make_status()
    now = later(before, 1)
    now.gateway.gateway_id = "another"
    rates = find_rates(before, now)
    assert (rates.time_to_first_token, rates.inter_token_latency) == (None, None)
    assert rates.completion_tokens == pytest.approx(1000)


def test_no_scheduler_then_or_now_has_no_rates() -> None:
    without = make_status()
    without.ClearField("scheduler")
    assert find_rates(without, make_status()) == Rates()
    assert find_rates(make_status(), without) == Rates()


def test_a_replica_that_came_meanwhile_has_no_rates() -> None:
    before = make_status()
    now = later(before, 1)
    now.scheduler.replicas.add(replica_id=1)
    assert find_replica_rates(before, now, 1) == ReplicaRates()


def test_nothing_is_told_of_no_prompts() -> None:
    before = make_status()
    now = later(before, 0.0)
    now.scheduler.uptime.FromSeconds(101)
    assert find_rates(before, now).cached_share is None


def test_states_are_words() -> None:
    replica = status_pb2.ReplicaStatus()
    assert replica_state(replica) == "not ready"
    replica.ready = True
    assert replica_state(replica) == "ready"
    replica.drain_state = status_pb2.DRAIN_STATE_DRAINING
    assert replica_state(replica) == "draining"
    replica.drain_state = status_pb2.DRAIN_STATE_DRAINED
    assert replica_state(replica) == "drained"
    assert worker_state(status_pb2.WorkerStatus(state=status_pb2.WORKER_STATE_CACHE_READY)) == "cache ready"


def test_a_pool_of_no_blocks_is_not_full() -> None:
    assert used_share(status_pb2.BlockPoolStatus()) == 0
    assert used_share(status_pb2.BlockPoolStatus(num_blocks=4, num_free_blocks=1)) == 0.75


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        *((0, "0 s"), (59.2, "59 s"), (59.9, "59 s"), (60, "1 min 0 s"), (125, "2 min 5 s")),
        *((3599.9, "59 min 59 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h"), (10**7, "115 d 17 h")),
    ],
)
def test_spans(seconds: float, told: str) -> None:
    assert units.span(seconds) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.00123, "1.23 ms"), (0.0123, "12.3 ms"), (0.123, "123 ms"), (1.234, "1.23 s"), (12.34, "12 s")],
)
def test_milliseconds(seconds: float, told: str) -> None:
    assert units.milliseconds(seconds) == told


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150 << 20, "150 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes(num_bytes: int, told: str) -> None:
    assert units.size(num_bytes) == told


@pytest.mark.parametrize(("number", "told"), [(0, "0"), (0.25, "0.2"), (9.9, "9.9"), (10, "10"), (12345.6, "12,346")])
def test_rates_are_short(number: float, told: str) -> None:
    assert units.rate(number) == told


@given(st.floats(-1, 2), st.integers(1, 20))
def test_bars_have_their_width(share: float, width: int) -> None:
    drawn = units.bar(share, width)
    assert len(drawn) == width
    # The last character may stand for a part of one.
    assert abs(drawn.count("█") - min(max(share, 0), 1) * width) < 1.1
    assert (
        drawn.count("█") == int(min(max(share, 0), 1) * width * 8 + 0.5) // 8 or abs(share * width * 8 % 1 - 0.5) < 1e-6
    )


def test_bars_are_full_and_empty() -> None:
    assert (units.bar(0, 3), units.bar(1, 3), units.bar(0.5, 1)) == ("   ", "███", "▌")


def test_the_start_of_workers_is_told_by_phase_and_bytes() -> None:
    status = make_status()
    assert find_start(status) is None
    (worker,) = status.scheduler.replicas[0].workers
    worker.state = status_pb2.WORKER_STATE_DEVICE_READY
    worker.start.phase = status_pb2.START_PHASE_LOAD_MODEL
    assert worker_state(worker) == "device ready, loading the model"
    worker.start.done_bytes, worker.start.total_bytes = 1 << 30, 4 << 30
    assert find_start(status) == ("loading the model", GIB, 4 * GIB)
    # Of several the one that is behind.
    other = status.scheduler.replicas.add(replica_id=1).workers.add()
    other.start.CopyFrom(worker.start)
    assert find_start(status) == ("loading the model", 2 * GIB, 8 * GIB)
    other.start.phase = status_pb2.START_PHASE_INITIALIZE_CACHE
    assert find_start(status) == ("loading the model", GIB, 4 * GIB)
    # Of a scheduler that is newer than this.
    worker.start.phase = 99  # type: ignore[assignment]
    assert worker_state(worker).startswith("device ready, starting")
