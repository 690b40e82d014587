"""How long whoever is sent away should stay away: by the rate at which the backlog drained, within bounds."""

from __future__ import annotations

import pytest

from scheduler_service.core.queues.overload import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    NUM_SLICES,
    PROMISED_SHARE,
    DrainRate,
    Limit,
    Overload,
)

ONE_REQUEST = Overload(Limit.QUEUE_FULL, num_requests=1)


def measured(seconds: int = 30, num_requests: int = 2, num_tokens: int = 100) -> DrainRate:
    """So many requests and tokens admitted in each second until then."""
    rate = DrainRate(0.0)
    for now in range(seconds):
        rate.note(num_requests, num_tokens, float(now))
    return rate


def told(rate: DrainRate, overload: Overload, now: float) -> float:
    """After what time, by the whole rate."""
    return rate.retry_after_seconds(overload, now) * PROMISED_SHARE


def test_the_excess_is_divided_by_the_rate() -> None:
    assert told(measured(), Overload(Limit.QUEUE_FULL, num_requests=6), 30.0) == pytest.approx(3, rel=0.1)
    assert told(measured(), Overload(Limit.TOKEN_BACKLOG, num_tokens=700), 30.0) == pytest.approx(7, rel=0.1)


def test_less_than_the_rate_is_promised() -> None:
    """Else those who come back when they were told to find the queue full as soon as the rate falls a little."""
    rate = measured(num_requests=10)
    last = max(rate.retry_after_seconds(ONE_REQUEST, 30.0) for _ in range(1000))
    assert 1000 / last <= 10 * 0.95


def test_a_young_process_divides_by_its_age() -> None:
    assert told(measured(4), Overload(Limit.QUEUE_FULL, num_requests=6), 4.0) == pytest.approx(3)


def test_a_little_is_not_worth_less_than_a_moment() -> None:
    assert measured(num_requests=1000).retry_after_seconds(ONE_REQUEST, 30.0) == MIN_RETRY_SECONDS


def test_without_any_progress_it_is_the_longest_time() -> None:
    assert DrainRate(0.0).retry_after_seconds(ONE_REQUEST, 1.0) == MAX_RETRY_SECONDS
    assert measured().retry_after_seconds(ONE_REQUEST, 100.0) == MAX_RETRY_SECONDS


def test_what_left_the_window_does_not_count() -> None:
    rate = measured(30, num_requests=100)
    for now in range(30, 61):
        rate.note(1, 1, float(now))
    assert told(rate, ONE_REQUEST, 61.0) == pytest.approx(1, rel=0.15)


def test_those_sent_away_are_told_to_come_one_after_another() -> None:
    rate = measured()
    times = [rate.retry_after_seconds(ONE_REQUEST, 30.0) for _ in range(4)]
    assert times == pytest.approx([number * times[0] for number in (1, 2, 3, 4)])
    assert rate.retry_after_seconds(ONE_REQUEST, 31.0) == pytest.approx(5 * times[0] - 1, rel=0.1)


def test_promises_end_with_the_longest_time() -> None:
    rate = measured()
    times = [rate.retry_after_seconds(ONE_REQUEST, 30.0) for _ in range(1000)]
    assert times[-1] == MAX_RETRY_SECONDS
    assert times == sorted(times)
    # They hold nobody up once they are over.
    assert rate.has_promised(30.0 + MAX_RETRY_SECONDS - 1)
    now = 30.0 + MAX_RETRY_SECONDS
    rate.note(60, 100, now - 1)
    assert not rate.has_promised(now)
    assert rate.retry_after_seconds(ONE_REQUEST, now) <= 1


def test_the_window_is_kept_in_a_few_parts() -> None:
    rate = DrainRate(0.0)
    for number in range(100_000):
        rate.note(1, 1, number / 1000)
    assert len(rate._slices) <= NUM_SLICES + 1
