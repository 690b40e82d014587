"""A short cut of benchmarks/gateway/open_streams.py: dozens of streams, not thousands, on a gateway's process."""

from __future__ import annotations

import pytest

from benchmarks.gateway import open_streams

NUM_STREAMS, NUM_CONNECTIONS = 40, 30


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_streams, "WARM_UP_SECONDS", 0.1)


@pytest.mark.parametrize(("front", "num_refused"), [("grpc", 0), ("http", NUM_STREAMS - NUM_CONNECTIONS)])
def test_streams_stay_open_and_get_their_tokens_and_those_beyond_the_limit_a_reason(
    front: str, num_refused: int
) -> None:
    flags = [f"--fronts={front}", f"--streams={NUM_STREAMS}", "--connections=4", "--rates=10", "--seconds=0.5"]
    [result] = open_streams.measure_all(open_streams.parse([*flags, f"--max-connections={NUM_CONNECTIONS}"]))
    assert result["num_streams"] == NUM_STREAMS - num_refused
    assert all(end.startswith("QUEUE_FULL") for end in result["ends"])
    assert sum(result["ends"].values()) == num_refused
    [rate] = result["rates"]
    assert rate["tokens_per_second"] > 0
    assert rate["cpu_us_per_token"] > 0
