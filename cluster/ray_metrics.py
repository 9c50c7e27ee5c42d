"""Our metrics as Ray's own: each node's metrics port then shows them as `ray_pagefleet_…`.

Mirrors what Prometheus would read now and then; counts nothing itself. A histogram arrives as its
sum and its count: its buckets are at the gateways' /metrics.
"""

# Ray is not wholly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
_Labels = tuple[tuple[str, str], ...]


class RayGauge(Protocol):
    """The part of `ray.util.metrics.Gauge` that is used."""

    def set(self, value: float, tags: dict[str, str]) -> None:
        """The value is this now."""
        ...


class RayCounter(Protocol):
    """The part of `ray.util.metrics.Counter` that is used."""

    def inc(self, value: float, tags: dict[str, str]) -> None:
        """So much more has happened."""
        ...


class RayMetrics(Protocol):
    """Where metrics are made: the module `ray.util.metrics`, or what stands for it."""

    def Gauge(self, name: str, description: str, tag_keys: tuple[str, ...]) -> RayGauge: ...

    def Counter(self, name: str, description: str, tag_keys: tuple[str, ...]) -> RayCounter: ...


class RayExporter:
    """One process's mirror."""

    def __init__(self, ray_metrics: RayMetrics) -> None:
        self._ray = ray_metrics
        self._gauges: dict[str, RayGauge] = {}
        self._counters: dict[str, RayCounter] = {}
        self._shown: set[tuple[str, _Labels]] = set()  # gauges that are not 0
        self._counts: dict[tuple[str, _Labels], float] = {}

    def export(self, families: Iterable[Metric]) -> None:
        """Bring Ray's up to these. A gauge that is no longer told of is 0."""
        shown: set[tuple[str, _Labels]] = set()
        for family in families:
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                labels = tuple(sorted(sample.labels.items()))
                if family.type == "gauge":
                    self._set(sample.name, family.documentation, labels, sample.value)
                    shown.add((sample.name, labels))
                else:
                    self._count(sample.name, family.documentation, labels, sample.value)
        for name, labels in self._shown - shown:
            self._gauges[name].set(0.0, dict(labels))
        self._shown = shown

    def _set(self, name: str, text: str, labels: _Labels, value: float) -> None:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = self._ray.Gauge(name, text, _keys(labels))
        gauge.set(value, dict(labels))

    def _count(self, name: str, text: str, labels: _Labels, value: float) -> None:
        more = value - self._counts.get((name, labels), 0.0)
        self._counts[name, labels] = value
        if more < 0.0:  # a replica began anew, and its counts with it
            more = value
        if more == 0.0:
            return
        name = name.removesuffix("_total")  # which Ray appends
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = self._ray.Counter(name, text, _keys(labels))
        counter.inc(more, dict(labels))


def start_export(families: Callable[[], Iterable[Metric]], period_s: float = PERIOD_S) -> None:
    """Mirror them in a thread of this Ray process for as long as it lives."""
    import ray.util.metrics

    exporter = RayExporter(ray.util.metrics)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        while True:
            try:
                exporter.export(families())
            except Exception:  # the edge of a thread that nothing depends on
                logger.exception("metrics could not be mirrored to Ray")
            done.wait(period_s)

    done = threading.Event()  # never set: the thread ends with its process
    threading.Thread(target=run, name="ray-metrics", daemon=True).start()


def _keys(labels: _Labels) -> tuple[str, ...]:
    return tuple(key for key, _ in labels)
