"""The simulated transport behaves as grpc.aio does: each case gives the same events over both.

What gRPC leaves open, because it depends on which of two threads is faster, is not looked at:

- the words of errors that name an address, and debug strings;
- metadata that gRPC adds by itself (`user-agent`) and the names of peers.
"""

from __future__ import annotations

import pytest

from tests.unit.kit.simulation import outcomes
from tests.unit.kit.simulation.worlds import events_of_real, events_of_simulated

CASES = {**outcomes.CASES}


@pytest.mark.parametrize("name", CASES)
def test_both_transports_give_the_same_events(name: str) -> None:
    assert events_of_simulated(CASES[name]) == events_of_real(CASES[name])
