"""Values count right, cost little and may be read while they are written; a registry gives what its catalogue says."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from blockyard.service.metrics import (
    COMMON,
    PROCESS,
    READY,
    TASKS,
    Counter,
    Histogram,
    Registry,
    counter,
    gauge,
    geometric,
    histogram,
)
from blockyard.version import __version__
from tests.kit.processes.scrape import Scrape

if TYPE_CHECKING:
    from collections.abc import Iterable

SERVED = counter("test_served_total", "Served.", "kind")
SEEN = counter("test_seen_total", "Seen.")
LEVEL = gauge("test_level", "Level.")
LEVELS = gauge("test_levels", "Levels.", "pool", "state")
SECONDS = histogram("test_seconds", "Seconds.", (0.1, 1.0), "phase")
CATALOGUE = (SERVED, SEEN, LEVEL, LEVELS, SECONDS)


@pytest.fixture
def registry() -> Registry:
    return Registry("test", CATALOGUE)


def test_a_counter_counts_by_labels() -> None:
    counts = Counter(("a",))
    assert dict(counts.samples()) == {("a",): 0}
    counts.add("a")
    counts.add("b", count=2.5)
    counts.add("a", count=3)
    assert dict(counts.samples()) == {("a",): 4, ("b",): 2.5}


def test_a_histogram_counts_what_is_up_to_a_bound() -> None:
    values = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        values.observe(value)
    values.observe(0.5, 10)
    assert values.buckets() == [("0.1", 2), ("1.0", 14), ("+Inf", 15)]
    assert values.count == 15
    assert values.sum == pytest.approx(0.05 + 0.1 + 0.5 + 1.0 + 7.0 + 5.0)


def test_a_value_beyond_all_bounds_and_one_below_zero_count() -> None:
    values = Histogram((1.0,))
    values.observe(-1e-9)
    values.observe(float("inf"))
    assert values.buckets() == [("1.0", 1), ("+Inf", 2)]


@pytest.mark.parametrize(
    ("first", "last", "bounds"),
    [
        (0.01, 0.1, (0.01, 0.02, 0.05, 0.1)),
        (20e-6, 0.0005, (2e-05, 5e-05, 0.0001, 0.0002, 0.0005)),
        (1, 20, (1, 2, 5, 10, 20)),
    ],
)
def test_bounds_that_read_well(first: float, last: float, bounds: Iterable[float]) -> None:
    assert geometric(first, last) == bounds


def test_a_declaration_is_checked() -> None:
    with pytest.raises(AssertionError):
        counter("test_served", "Served.")
    with pytest.raises(AssertionError):
        histogram("test_seconds", "Seconds.", (1.0, 0.1))
    with pytest.raises(AssertionError):
        histogram("test_seconds", "Seconds.", (1.0, 1.0))


def test_a_registry_gives_what_was_counted_and_reads_what_is(registry: Registry) -> None:
    served, seen = registry.counter(SERVED, ("known",)), registry.counter(SEEN)
    fast, slow = registry.histogram(SECONDS, "fast"), registry.histogram(SECONDS, "slow")
    level = 1.0
    registry.read(LEVEL, lambda: level)
    registry.read(LEVELS, lambda: {("device", "free"): 3, ("host", "used"): level})
    registry.read(READY, lambda: True)
    registry.read(TASKS, lambda: 3)
    assert registry.find_missing == []
    served.add("new", count=2)
    fast.observe(0.01)
    slow.observe(2.0, 3)
    level = 7.0
    scrape = Scrape.of(registry)
    assert scrape.sum("test_served_total", kind="known") == 0
    assert scrape.sum("test_served_total", kind="new") == 2
    assert scrape.labels("test_served_total") == [{"kind": "known"}, {"kind": "new"}]
    assert scrape.labels("test_seen_total") == [{}]
    assert scrape.sum("test_level") == 7
    assert scrape.sum("test_levels", pool="host", state="used") == 7
    assert scrape.sum("test_seconds_count", phase="fast") == 1
    assert scrape.sum("test_seconds_sum", phase="slow") == 6
    assert scrape.sum("test_seconds_bucket", phase="slow", le="1.0") == 0
    assert scrape.sum("test_seconds_bucket", phase="slow", le="+Inf") == 3
    assert scrape.sum("blockyard_build_info", service="test", version=__version__) == 1
    assert scrape.sum("blockyard_ready") == 1
    assert scrape.sum("blockyard_tasks") == 3
    seen.add()
    assert Scrape.of(registry).sum("test_seen_total") == 1


def test_every_metric_of_the_catalogue_is_told_in_its_kind(registry: Registry) -> None:
    scrape = Scrape.of(registry)
    assert [metric.name for metric in (*COMMON, *CATALOGUE, *PROCESS) if not scrape.has(metric)] == []
    assert len(scrape.kinds) == len({*COMMON, *CATALOGUE, *PROCESS})
    assert registry.find_missing == ["blockyard_ready", "blockyard_tasks", *(metric.name for metric in CATALOGUE)]


def test_the_process_tells_of_itself(registry: Registry) -> None:
    scrape = Scrape.of(registry)
    assert scrape.sum("process_resident_memory_bytes") > 1e6
    assert 3 <= scrape.sum("process_open_fds") < scrape.sum("process_max_fds")
    assert scrape.sum("process_cpu_seconds_total") > 0


def test_a_metric_that_cannot_be_read_does_not_take_the_others_along(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> float:
        raise RuntimeError("changed size during iteration")

    registry.read(LEVEL, fail)
    registry.counter(SEEN).add(count=5)
    scrape = Scrape.of(registry)
    assert not scrape.has(LEVEL)
    assert scrape.sum("test_seen_total") == 5
    assert "a metric cannot be read" in caplog.text


def test_a_scraper_that_asks_for_openmetrics_gets_it(registry: Registry) -> None:
    registry.counter(SERVED, ("a",))
    registry.histogram(SECONDS, "fast").observe(0.5)
    content, content_type = registry.encode("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(content.decode())}
    assert {"test_served", "test_seconds", "blockyard_build_info"} <= names
    assert registry.encode("text/html")[1].startswith("text/plain")


def test_a_bucket_tells_the_trace_of_its_last_value_that_has_one(registry: Registry) -> None:
    seconds = registry.histogram(SECONDS, "fast")
    assert registry.histogram(SECONDS, "fast") is seconds
    before = time.time()
    for value, trace_id in ((0.5, "a" * 32), (0.6, "b" * 32), (0.7, None), (7.0, "c" * 32), (0.05, "")):
        seconds.observe(value, trace_id=trace_id)
    content, _ = registry.encode("application/openmetrics-text; version=1.0.0")
    samples = [
        sample
        for family in parse_openmetrics(content.decode())
        if family.name == SECONDS.name
        for sample in family.samples
        if sample.name.endswith("_bucket")
    ]
    found = {sample.labels["le"]: sample.exemplar for sample in samples}
    assert found["0.1"] is None
    told = {end: (exemplar.labels, exemplar.value) for end, exemplar in found.items() if exemplar}
    assert told == {"1.0": ({"trace_id": "b" * 32}, 0.6), "+Inf": ({"trace_id": "c" * 32}, 7.0)}
    assert all(before - 1 <= float(each.timestamp) <= time.time() + 1 for each in found.values() if each)
    # The older format has no place for them.
    assert b"trace_id" not in registry.encode()[0]
    assert Scrape.of(registry).sum("test_seconds_count", phase="fast") == 5


def test_values_are_read_while_they_are_written(registry: Registry) -> None:
    """A scrape waits for nobody: what it reads of a histogram belongs together, and counts only ever grow."""
    served, seconds = registry.counter(SERVED), registry.histogram(SECONDS, "fast")
    registry.histogram(SECONDS, "slow")
    stopping = threading.Event()

    def write() -> None:
        number = 0
        while not stopping.is_set():
            served.add(str(number % 500))
            seconds.observe(0.5 if number % 2 else 5.0)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    last = 0.0
    try:
        for _ in range(30):
            scrape = Scrape.of(registry)
            count = scrape.sum("test_seconds_count", phase="fast")
            assert scrape.sum("test_seconds_bucket", phase="fast", le="+Inf") == count >= last
            last = count
    finally:
        stopping.set()
        writer.join()
    scrape = Scrape.of(registry)
    assert scrape.sum("test_served_total") == scrape.sum("test_seconds_count") == seconds.count > 0
