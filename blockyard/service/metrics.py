"""A process's metrics for Prometheus: declared once, cheap to write, and encoded as text.

A catalogue declares what a service exposes; the reference page is made of it, and a registry gives exactly that.
Values are written by one thread and read by any, under the interpreter's own lock and no other: a scrape makes nobody
wait, and may at worst miss what is being written. What exists already as somebody's state is read when it is asked for.

Knows no service, and no way to a scraper.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from blockyard.telemetry import EventLogger
from blockyard.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client.metrics_core import Metric as Family

    Samples = Iterable[tuple[tuple[str, ...], float]]
    """Values by their labels, in the order of the declaration."""

log = EventLogger(__name__)


class Kind(StrEnum):
    """The behaviour of a metric: a counter only grows, a gauge is what is now, a histogram counts by size."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric in a catalogue. `bounds`: the upper ends of a histogram's buckets, without the last, infinity."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def counter(name: str, help: str, *labels: str) -> Metric:
    """Declares a counter, whose name ends with `_total`."""
    assert name.endswith("_total"), name
    return Metric(name, Kind.COUNTER, help, labels)


def gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, help, labels)


def histogram(name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    """Declares a histogram; what is equal to a bound counts below it."""
    assert list(bounds) == sorted(set(bounds)), name
    return Metric(name, Kind.HISTOGRAM, help, labels, bounds)


BUILD_INFO = gauge("blockyard_build_info", "Always 1.", "service", "version")
READY = gauge("blockyard_ready", "Whether readiness probes are answered with yes: 1 or 0.")
TASKS = gauge(
    "blockyard_tasks", "Tasks of the event loop that are not done: what grows here without load was left behind."
)
GRPC_CALLS = counter(
    "blockyard_grpc_calls_total",
    "gRPC calls that ended, by `package.Service/Method` and status code. Health and reflection do not count.",
    "method",
    "code",
)
CERTIFICATE_EXPIRY = gauge(
    "blockyard_certificate_expiry_time_seconds",
    "When the certificate ends that this process shows, in seconds since 1970: `public` to clients, `internal` to the"
    " other services. Not there without TLS.",
    "certificate",
)
COMMON = (BUILD_INFO, READY, TASKS, GRPC_CALLS, CERTIFICATE_EXPIRY)
"""What every service has."""

PROCESS = (
    gauge("process_virtual_memory_bytes", "Virtual memory."),
    gauge("process_resident_memory_bytes", "Resident memory."),
    gauge("process_start_time_seconds", "When the process started, in seconds since 1970."),
    counter("process_cpu_seconds_total", "Processor time, of user and system."),
    gauge("process_open_fds", "Open file descriptors."),
    gauge("process_max_fds", "File descriptors that may be open."),
)
"""What every process has, under the names that Prometheus' own libraries use; on Linux."""


class Counter:
    """Counts by labels. Written by one thread."""

    __slots__ = ("_counts",)

    def __init__(self, *known: tuple[str, ...]) -> None:
        """`known`: labels that are exposed before anything was counted, so that the first count is an increase."""
        self._counts: dict[tuple[str, ...], float] = dict.fromkeys(known, 0)

    def add(self, *labels: str, count: float = 1) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + count

    def samples(self) -> Samples:
        """Returns the counts by their labels. From any thread."""
        return self._counts.copy().items()


class Histogram:
    """Counts by size. Written by one thread."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, so many times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Counts the values of each bucket alone; the last one has those above all bounds."""
        return tuple(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Upper ends and how many values were up to them. From any thread."""
        ends = map(floatToGoString, (*self.bounds, inf))
        return list(zip(ends, accumulate(self._counts.copy()), strict=True))


class Registry:
    """The values of one process, for a catalogue. Give each metric its values by `counter`, `histogram` or `read`."""

    def __init__(self, service: str, catalogue: Iterable[Metric]) -> None:
        self.catalogue = (*COMMON, *catalogue)
        self._samples: dict[str, Callable[[], Samples]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        # Called before each scrape, in the thread of who asks, to have at hand what is known elsewhere.
        self.before_scrape: Callable[[], None] = lambda: None
        self._prometheus = CollectorRegistry()
        self._prometheus.register(_Collector(self))  # type: ignore[arg-type]
        ProcessCollector(registry=self._prometheus)
        self.read(BUILD_INFO, lambda: {(service, __version__): 1.0})
        self.grpc_calls = self.counter(GRPC_CALLS)
        # Until a service says which it shows.
        self.read(CERTIFICATE_EXPIRY, dict[tuple[str, ...], float])

    def counter(self, metric: Metric, *known: tuple[str, ...]) -> Counter:
        """Makes the values of a counter; without labels it is exposed from the beginning, as those `known` are."""
        made = Counter(*known) if metric.labels else Counter(())
        self._samples[metric.name] = made.samples
        return made

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Makes a histogram, or one of several by their labels."""
        made = Histogram(metric.bounds)
        self._histograms.setdefault(metric.name, {})[labels] = made
        return made

    def extend(self, catalogue: Iterable[Metric]) -> None:
        """Declares more metrics, behind those that there are."""
        self.catalogue = (*self.catalogue, *catalogue)

    def share(self, metric: Metric, values: Histogram, *labels: str) -> None:
        """Gives a histogram the values of another one, which has the same bounds."""
        assert metric.bounds == values.bounds, metric.name
        self._histograms.setdefault(metric.name, {})[labels] = values

    def read(self, metric: Metric, read: Callable[[], float | Mapping[tuple[str, ...], float]]) -> None:
        """Has a gauge or a counter read when it is asked for, in the thread that asks: by labels, if it has some."""

        def samples() -> Samples:
            value = read()
            return {(): value}.items() if isinstance(value, int | float) else value.items()

        self._samples[metric.name] = samples

    @property
    def find_missing(self) -> list[str]:
        return [each.name for each in self.catalogue if each.name not in self._samples | self._histograms]

    def families(self) -> Iterable[Family]:
        """All values, in the order of the catalogue. One that cannot be read is left out, and the log says why."""
        for metric in self.catalogue:
            try:
                yield self._family(metric)
            except Exception:
                log.exception("a metric cannot be read", metric=metric.name)

    def _family(self, metric: Metric) -> Family:
        if metric.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, values in self._histograms.get(metric.name, {}).items():
                family.add_metric(labels, values.buckets(), values.sum)
            return family
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in self._samples.get(metric.name, list)():
            family.add_metric(labels, value)
        return family

    def encode(self, accept: str = "") -> tuple[bytes, str]:
        """Writes all values as a scraper asks for them by its Accept header, and names the type. From any thread."""
        self.before_scrape()
        encode, content_type = choose_encoder(accept)
        return encode(self._prometheus), content_type


class _Collector:
    """A registry as prometheus_client wants it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        return self._registry.families()


def geometric(first: float, last: float, *, steps: tuple[float, ...] = (1, 2, 5)) -> tuple[float, ...]:
    """Bounds that read well, each a step of its power of ten."""
    bounds: list[float] = []
    power = -6
    while not bounds or bounds[-1] < last:
        bounds += [bound for step in steps if first <= (bound := float(f"{step}e{power}")) <= last]
        power += 1
    return tuple(bounds)
