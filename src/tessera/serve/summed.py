"""Merge the metrics of several replicas: sum counters, histograms and most gauges; average other gauges (`MEANS`)."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

MEANS = ("_perc", "step_cost_seconds", "step_limit_seconds")
"""Suffixes of the names of gauges to average; all other gauges are summed."""
CREATED = "_created"
"""Suffix of metrics that hold the creation times of counters. They are omitted: a sum of times means nothing."""


def summed(texts: Sequence[str], *, ready: int, lost: int, retried: int) -> bytes:
    """Return the merged metrics of all replicas, with `ready`, `lost` and `retried`, in Prometheus' text format.

    Args:
        texts: each replica's metrics in the same format.
        ready: number of replicas that accept requests.
        lost: number of times that a replica crashed or stopped answering.
        retried: number of requests that were sent to another replica because the first was lost.
    """
    registry = CollectorRegistry()
    registry.register(_Families(_merged(texts)))
    about = "Times that a replica crashed or stopped answering."
    again = "Requests sent to another replica because the first was lost."
    own = [
        GaugeMetricFamily("tessera:replicas_ready", "Replicas that accept requests.", value=ready),
        CounterMetricFamily("tessera:replicas_lost", about, value=lost),
        CounterMetricFamily("tessera:requests_retried", again, value=retried),
    ]
    registry.register(_Families(own))
    return generate_latest(registry)


class _Families:
    """Collector that always returns the same metrics."""

    def __init__(self, families: Iterable[Metric]):
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _merged(texts: Sequence[str]) -> list[Metric]:
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple, float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.endswith(CREATED):
                continue
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                found[key] = found.get(key, 0.0) + sample.value
    for name, family in families.items():
        part = len(texts) if name.endswith(MEANS) else 1
        for (sample, labels), value in values[name].items():
            family.add_sample(sample, dict(labels), value / part)
    return list(families.values())
