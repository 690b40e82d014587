"""The clock by itself, and the client's share of it."""

from __future__ import annotations

import re
from random import Random

import pytest

from blockyard.client import codec
from blockyard.client.resumption import Resumption
from blockyard.client.retry import Attempts, RetryPolicy
from blockyard.clock import SYSTEM, Clock
from blockyard.errors import BlockyardError, Reason

BUSY = BlockyardError(Reason.NO_READY_WORKER, "none")


def test_a_seed_repeats_what_is_drawn() -> None:
    def draw(seed: int) -> tuple[object, ...]:
        clock = Clock(random=Random(seed))
        return clock.token_bytes(16), clock.token_hex(8), clock.uuid_hex(), clock.random.uniform(0.5, 1.0)

    assert draw(1) == draw(1)
    assert all(one != other for one, other in zip(draw(1), draw(2), strict=True))


def test_the_systems_names_are_of_the_asked_length_and_differ() -> None:
    names = [SYSTEM.token_hex(8) for _ in range(100)]
    assert len(set(names)) == 100
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in names)
    # The digits in which a random UUID has its version and its variant.
    assert re.fullmatch("[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}", SYSTEM.uuid_hex())
    assert len(SYSTEM.token_bytes(16)) == 16


def test_a_clients_ids_and_delays_are_its_clocks() -> None:
    def follow(seed: int) -> list[object]:
        attempts = Attempts(RetryPolicy(), None, clock=Clock(random=Random(seed)))
        resumption = Resumption(codec.make_spec("Hi", {}), attempts)
        return [resumption.request_id, *(resumption.delay_after(BUSY) for _ in range(3))]

    assert follow(1) == follow(1)
    assert all(one != other for one, other in zip(follow(1), follow(2), strict=True))


def test_a_clients_deadline_is_by_its_clock() -> None:
    now = 5.0
    attempts = Attempts(RetryPolicy(max_attempts=1, resume_seconds=10.0), 60.0, clock=Clock(monotonic=lambda: now))
    assert attempts.deadline.remaining() == 60.0
    attempts.delay_after(BUSY, has_begun=True)
    now = 14.9
    attempts.delay_after(BUSY, has_begun=True)
    now = 15.0
    with pytest.raises(BlockyardError):
        attempts.delay_after(BUSY, has_begun=True)
    assert attempts.deadline.remaining() == 50.0
