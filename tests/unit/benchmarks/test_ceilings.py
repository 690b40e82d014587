"""The ceilings: compiled and run here, over less memory."""

import pytest

from benchmarks.kernels import ceilings
from benchmarks.kernels.ceilings import Rate


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 8 << 20)
    monkeypatch.setattr(ceilings, "TURNS_OF_A_PASS", 1000)
    ceilings._buffer.cache_clear()
    yield
    # What is allocated is as small as it was told to be.
    ceilings._buffer.cache_clear()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_measures_every_ceiling(num_threads):
    measured = ceilings.measure(num_threads, seconds=0.05)
    assert measured.num_threads == num_threads
    for kind in ("bandwidth", *ceilings.KINDS):
        rate = getattr(measured, kind)
        assert 0 < rate.median <= rate.best


def test_what_the_processor_lacks_stands_at_the_next_wider_type(monkeypatch):
    wide = Rate(1.0, 2.0)
    monkeypatch.setattr(ceilings, "measure_rate", lambda kind, *_: wide if kind == "float32" else None)
    measured = ceilings.measure(1, seconds=0.01)
    assert measured.bfloat16 == measured.int8 == wide


def test_rates_of_passes():
    assert Rate.of(12.0, [2.0, 3.0, 4.0]) == Rate(median=4.0, best=6.0)


def test_passes_fill_the_time_and_are_never_few():
    assert ceilings.passes_for(1.0, [0.5, 0.01]) == 100
    assert ceilings.passes_for(0.0, [1.0]) == 5


def test_describes_for_people():
    rate = Rate(1e9, 2e9)
    assert "bfloat16    GFLOP/s        1.0       2.0" in ceilings.describe(ceilings.Ceilings(2, rate, rate, rate, rate))
