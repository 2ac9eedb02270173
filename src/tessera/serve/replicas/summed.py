"""Merge the metrics of several replicas: sum counters, histograms and most gauges; average other gauges (`MEANS`).

Prometheus takes a counter that falls for one that began again at 0, and counts its whole value a second time. So the
counters of a replica's process stay in the sum when the process ends.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

MEANS = ("_perc", "step_cost_seconds", "step_limit_seconds")
"""Suffixes of the names of gauges to average; all other gauges are summed."""
CREATED = "_created"
"""Suffix of metrics that hold the creation times of counters. They are omitted: a sum of times means nothing."""
COUNTED = ("counter", "histogram")
"""Types of the metrics that never fall while a process lives."""


class Totals:
    """Merged metrics of all processes, whose counters never fall."""

    def __init__(self):
        self._ended: list[Metric] = []  # counters of the processes that have ended
        self._shown: list[Metric] = []  # counters of the last answer

    def end(self, metrics: Iterable[Metric]) -> None:
        """Keep the counters of a process that has ended; drop its gauges."""
        self._ended = merged([self._ended, counted(metrics)])

    def text(self, metrics: Iterable[Sequence[Metric]], *, ready: int, lost: int, retried: int) -> bytes:
        """Return the merged metrics in Prometheus' text format; `metrics` are those of each process that runs."""
        found = merged([self._ended, *metrics])
        # Two answers of a replica may arrive in the wrong order, and the order of its terms changes a sum of floats.
        found = merged([self._shown, found], max)
        self._shown = counted(found)
        about = "Times that a replica crashed or stopped answering."
        again = "Requests sent to another replica because the first was lost or restarted."
        own = [
            GaugeMetricFamily("tessera:replicas_ready", "Replicas that accept requests.", value=ready),
            CounterMetricFamily("tessera:replicas_lost", about, value=lost),
            CounterMetricFamily("tessera:requests_retried", again, value=retried),
        ]
        return generate_latest(SimpleNamespace(collect=lambda: [*found, *own]))


def parsed(text: str) -> list[Metric]:
    return [family for family in text_string_to_metric_families(text) if not family.name.endswith(CREATED)]


def counted(metrics: Iterable[Metric]) -> list[Metric]:
    return [family for family in metrics if family.type in COUNTED]


def merged(parts: Iterable[Iterable[Metric]], fold: Callable[[float, float], float] = operator.add) -> list[Metric]:
    """Combine equal samples of all parts with `fold`; average those of `MEANS` over the parts that have them."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple, float]] = {}
    parts_with: Counter[str] = Counter()
    for family in (family for part in parts for family in part):
        families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        parts_with[family.name] += 1
        found = values.setdefault(family.name, {})
        for sample in family.samples:
            key = sample.name, tuple(sample.labels.items())
            found[key] = fold(found[key], sample.value) if key in found else sample.value
    for name, family in families.items():
        divisor = parts_with[name] if name.endswith(MEANS) else 1
        for (sample, labels), value in values[name].items():
            family.add_sample(sample, dict(labels), value / divisor)
    return list(families.values())
