from __future__ import annotations

import itertools

import pytest

from blockyard.service import faults
from tests.kit.chaos.chaos_requests import KINDS, SHARED_PREFIX_LENGTH, make_requests
from tests.kit.chaos.fault_schedule import KINDS_OF, MIN_REST_SECONDS, POINTS, Kind, Rates, make_schedule

OTHERS = ["scheduler", "gateway-0", "gateway-1"]
NAMES = ["worker-0", "worker-1", *OTHERS]


def test_a_schedule_is_a_function_of_its_seed() -> None:
    schedules = [make_schedule(seed, 100, NAMES, Rates()) for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1] != schedules[2]
    # A longer run begins like a shorter one.
    assert make_schedule(1, 50, NAMES, Rates()) == [strike for strike in schedules[0] if strike.at_seconds < 50]


@pytest.mark.parametrize("names", [NAMES, ["rank-0", "rank-1", *OTHERS]])
def test_every_member_is_struck_in_every_way(names: list[str]) -> None:
    strikes = make_schedule(3, 3000, names, Rates())
    roles = {name: name.partition("-")[0] for name in names}
    assert {(strike.kind, strike.name) for strike in strikes} == {
        (kind, name) for name in names for kind in KINDS_OF[roles[name]]
    }
    points = {fault.point for strike in strikes for fault in faults.parse(strike.armed)}
    assert points == {point for role in roles.values() for point in POINTS.get(role, ())}


def test_a_member_rests_after_a_strike() -> None:
    strikes = make_schedule(4, 1000, NAMES, Rates())
    assert [strike.at_seconds for strike in strikes] == sorted(strike.at_seconds for strike in strikes)
    for name in NAMES:
        own = [strike for strike in strikes if strike.name == name]
        for before, after in itertools.pairwise(own):
            assert after.at_seconds >= before.at_seconds + before.seconds + MIN_REST_SECONDS


def test_only_what_is_asked_for_comes() -> None:
    strikes = make_schedule(5, 300, NAMES, Rates(kinds=(Kind.FREEZE,), roles=("gateway",), max_freeze_seconds=1.0))
    assert strikes
    assert {strike.kind for strike in strikes} == {Kind.FREEZE}
    assert {strike.name for strike in strikes} == {"gateway-0", "gateway-1"}
    assert all(0 < strike.seconds <= 1 for strike in strikes)


@pytest.mark.parametrize("number", [1, 8, 64])
def test_requests_are_a_function_of_their_seed(number: int) -> None:
    requests = make_requests(1, number)
    assert requests == make_requests(1, 64)[:number] != make_requests(2, number)
    assert [request.number for request in requests] == list(range(number))


def test_requests_are_of_every_kind() -> None:
    requests = make_requests(1, 64)
    assert {request.kind for request in requests} == set(KINDS)
    assert all(request.stops == ("stop string" in request.kind) for request in requests)
    prefixes = {tuple(request.prompt[:SHARED_PREFIX_LENGTH]) for request in requests if request.kind == "shared prefix"}
    assert len(prefixes) == 1
    assert any(request.options.get("n") == 3 for request in requests)
    assert any("logprobs" in request.options for request in requests)
