"""Prometheus metrics of a worker, read from its ledger and its fabric when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from engine.messages import LedgerSnapshot


class WorkerCollector(Collector):
    """Nothing is pushed: a scrape shows the state of that moment, so no gauge can go stale."""

    def __init__(
        self,
        ledger: Callable[[], LedgerSnapshot | None],
        counters: Callable[[], dict[str, int]],
        labels: Callable[[], dict[str, str]],
    ) -> None:
        self._ledger = ledger
        self._counters = counters
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("kvbaton_worker", "Role, incarnation, fabric and lane", value=self._labels())
        ledger = self._ledger()
        if ledger is not None:
            blocks = GaugeMetricFamily("kvbaton_kv_blocks", "KV blocks by state", labels=["state"])
            for state in ("free", "cached", "running", "reserved", "held"):
                blocks.add_metric([state], getattr(ledger, state))
            yield blocks
            requests = GaugeMetricFamily("kvbaton_engine_requests", "Requests by state", labels=["state"])
            for state, count in ledger.requests.items():
                requests.add_metric([state], count)
            yield requests
        for name, value in self._counters().items():
            yield CounterMetricFamily(f"kvbaton_fabric_{name}", f"Fabric: {name.replace('_', ' ')}", value=value)


def registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
