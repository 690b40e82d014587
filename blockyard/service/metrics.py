"""A process's Prometheus metrics: declared once, cheap to write, and encoded as text.

A catalogue declares a service's metrics; the reference page is generated from it, and a registry exposes exactly these
metrics. One thread writes a value and any thread may read it, protected only by the interpreter's own lock: a scrape
blocks nobody, and may at worst miss the value being written. State that exists elsewhere is read at scrape time.

Contains no service's metrics and no HTTP.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.samples import Exemplar
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
    """The type of a metric: a counter only grows, a gauge is a current value, a histogram counts by buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric. `bounds`: upper bounds of a histogram's buckets, without the last one, infinity."""

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
    """Declares a histogram; a value equal to a bound belongs to the bucket below the bound."""
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
"""The metrics that every service has."""


def declared_in(names: Mapping[str, object]) -> tuple[Metric, ...]:
    """Returns the metrics among a module's names, in the order of their declarations, without the common ones."""
    return tuple(each for each in names.values() if isinstance(each, Metric) and each not in COMMON)


PROCESS = (
    gauge("process_virtual_memory_bytes", "Virtual memory."),
    gauge("process_resident_memory_bytes", "Resident memory."),
    gauge("process_start_time_seconds", "When the process started, in seconds since 1970."),
    counter("process_cpu_seconds_total", "Processor time, of user and system."),
    gauge("process_open_fds", "Open file descriptors."),
    gauge("process_max_fds", "File descriptors that may be open."),
)
"""The metrics of every process on Linux, under the names of Prometheus' own libraries."""


class Counter:
    """A counter, with a count for each combination of labels. Written by one thread."""

    __slots__ = ("_counts",)

    def __init__(self, *known: tuple[str, ...]) -> None:
        """`known`: labels that are exposed as 0 from the start, so that their first count shows as an increase."""
        self._counts: dict[tuple[str, ...], float] = dict.fromkeys(known, 0)

    def add(self, *labels: str, count: float = 1) -> None:
        self._counts[labels] = self._counts.get(labels, 0) + count

    def samples(self) -> Samples:
        """Returns the counts by labels. May be called from any thread."""
        return self._counts.copy().items()


class Histogram:
    """A histogram of one combination of labels. Written by one thread."""

    __slots__ = ("_counts", "_exemplars", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        # By bucket: the last value that belongs to a trace.
        self._exemplars: dict[int, Exemplar] = {}
        self.sum = 0.0

    def observe(self, value: float, count: int = 1, *, trace_id: str | None = None) -> None:
        """Counts a value. `trace_id`: the trace of its request, of which it becomes the bucket's exemplar."""
        bucket = bisect_left(self.bounds, value)
        self._counts[bucket] += count
        self.sum += value * count
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, value, time.time())

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values in each bucket, not cumulative; the last bucket is above all bounds."""
        return tuple(self._counts)

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Returns cumulative counts by upper bound, with exemplars if there are. May be called from any thread."""
        ends = map(floatToGoString, (*self.bounds, inf))
        counts = zip(ends, accumulate(self._counts.copy()), strict=True)
        return [
            (*each, exemplar) if (exemplar := self._exemplars.get(bucket)) else each
            for bucket, each in enumerate(counts)
        ]


class Registry:
    """The values of a process's catalogue. Create each metric's values by `counter`, `histogram` or `read`."""

    def __init__(self, service: str, catalogue: Iterable[Metric]) -> None:
        self.catalogue = (*COMMON, *catalogue)
        self._samples: dict[str, Callable[[], Samples]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        # Called before each scrape, in the scraper's thread, to fetch values from elsewhere.
        self.before_scrape: Callable[[], None] = lambda: None
        self._prometheus = CollectorRegistry()
        self._prometheus.register(_Collector(self))  # type: ignore[arg-type]
        ProcessCollector(registry=self._prometheus)
        self.read(BUILD_INFO, lambda: {(service, __version__): 1.0})
        self.grpc_calls = self.counter(GRPC_CALLS)
        # No certificates, until the service sets them.
        self.read(CERTIFICATE_EXPIRY, dict[tuple[str, ...], float])

    def counter(self, metric: Metric, *known: tuple[str, ...]) -> Counter:
        """Creates a counter's values. A counter without labels, and the `known` labels, are exposed from the start."""
        made = Counter(*known) if metric.labels else Counter(())
        self._samples[metric.name] = made.samples
        return made

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """Returns a histogram's values for one combination of labels; creates them at the first call."""
        known = self._histograms.setdefault(metric.name, {})
        return known.get(labels) or known.setdefault(labels, Histogram(metric.bounds))

    def extend(self, catalogue: Iterable[Metric]) -> None:
        self.catalogue = (*self.catalogue, *catalogue)

    def share(self, metric: Metric, values: Histogram, *labels: str) -> None:
        """Exposes another histogram's values under this metric; both must have the same bounds."""
        assert metric.bounds == values.bounds, metric.name
        self._histograms.setdefault(metric.name, {})[labels] = values

    def read(self, metric: Metric, read: Callable[[], float | Mapping[tuple[str, ...], float]]) -> None:
        """Reads a gauge or counter at scrape time, in the scraper's thread: a number, or a mapping by labels."""

        def samples() -> Samples:
            value = read()
            return {(): value}.items() if isinstance(value, int | float) else value.items()

        self._samples[metric.name] = samples

    @property
    def find_missing(self) -> list[str]:
        return [each.name for each in self.catalogue if each.name not in self._samples | self._histograms]

    def families(self) -> Iterable[Family]:
        """Yields all metrics in the catalogue's order. A metric that cannot be read is logged and left out."""
        for metric in self.catalogue:
            try:
                yield self._family(metric)
            except Exception:
                log.exception("a metric cannot be read", metric=metric.name)

    def _family(self, metric: Metric) -> Family:
        if metric.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, values in self._histograms.get(metric.name, {}).copy().items():
                family.add_metric(labels, values.buckets(), values.sum)
            return family
        make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = make(metric.name, metric.help, labels=metric.labels)
        for labels, value in self._samples.get(metric.name, list)():
            family.add_metric(labels, value)
        return family

    def encode(self, accept: str = "") -> tuple[bytes, str]:
        """Encodes all values in the format of the Accept header; returns them and the content type. From any thread.

        Exemplars are only part of OpenMetrics.
        """
        self.before_scrape()
        encode, content_type = choose_encoder(accept)
        return encode(self._prometheus), content_type


class _Collector:
    """Adapts a registry to prometheus_client."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        return self._registry.families()


def geometric(first: float, last: float, *, steps: tuple[float, ...] = (1, 2, 5)) -> tuple[float, ...]:
    """Returns round bounds from `first` to `last`: each of `steps` times each power of ten."""
    bounds: list[float] = []
    power = -6
    while not bounds or bounds[-1] < last:
        bounds += [bound for step in steps if first <= (bound := float(f"{step}e{power}")) <= last]
        power += 1
    return tuple(bounds)
