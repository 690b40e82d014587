"""The simulated transport behaves as grpc.aio does: each case gives the same events over both, with several seeds.

What gRPC leaves open is not looked at, because it depends on which of two threads is faster, or on the machine:

- the order of what happens on one side and what happens on the other, where they do not wait for each other;
- how a write ends that meets the call's end. The real one may make the status INTERNAL, as the simulated one may;
- whether the cancelling of a task that reads in the very instant in which a message arrives cancels the call;
- in an error's details, the words behind `failed to connect to all addresses` and around `Stream removed`, and those of
  the system's errors when a connection is lost;
- the words of grpc.aio.InternalError, and debug strings;
- peers' names and `user-agent`, and by how much gRPC rounds a deadline that it sends;
- how much is written before a window is full. The real one adapts it; the simulated one has 64 KiB for each call.
"""

from __future__ import annotations

import pytest

from tests.integration.kit.simulation import calls, failures, outcomes, servers, sizes
from tests.integration.kit.simulation.worlds import events_of_real, events_of_simulated

CASES = {**outcomes.CASES, **calls.CASES, **failures.CASES, **servers.CASES, **sizes.CASES}
NUM_SEEDS = 3


@pytest.mark.parametrize("name", CASES)
def test_both_transports_give_the_same_events(name: str) -> None:
    real = events_of_real(CASES[name])
    for seed in range(NUM_SEEDS):
        assert events_of_simulated(CASES[name], seed) == real
