"""What Prometheus reads of a service: the text of `/metrics`, parsed by Prometheus' own library."""

from __future__ import annotations

import urllib.request
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from blockyard.service.metrics import Metric, Registry


class Scrape:
    """One reading. Names are those of samples: a histogram has `_bucket`, `_count` and `_sum`."""

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        self._samples = [sample for family in families for sample in family.samples]

    @classmethod
    def of(cls, registry: Registry) -> Scrape:
        """Reads a registry of this process."""
        return cls(registry.encode()[0].decode())

    @classmethod
    def get(cls, address: str) -> Scrape:
        """Reads a service at host:port."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
            return cls(response.read().decode())

    def sum(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels, whatever others they have; 0 where there is none."""
        wanted = labels.items()
        return sum(each.value for each in self._samples if each.name == name and wanted <= each.labels.items())

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each sample of a name."""
        return [sample.labels for sample in self._samples if sample.name == name]

    def has(self, metric: Metric) -> bool:
        """Whether there is a metric of this name and kind."""
        return self.kinds.get(metric.name.removesuffix("_total")) == metric.kind
