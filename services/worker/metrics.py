"""Prometheus metrics of a worker, read from its ledger and its fabric when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from services.worker.ledger_report import BLOCK_STATES, fabric_counters, fabric_gauges


class WorkerCollector(Collector):
    """Nothing is pushed: a scrape shows the state of that moment, so no gauge can go stale. `report` is that of
    services.worker.ledger_report."""

    def __init__(self, report: Callable[[], dict[str, Any]], labels: Callable[[], dict[str, str]]) -> None:
        self._report = report
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        yield InfoMetricFamily("kvbaton_worker", "Role, incarnation, fabric and lane", value=self._labels())
        report = self._report()
        if report["blocks"]:
            blocks = {state: report["blocks"][state] for state in BLOCK_STATES}
            yield _by_state("kvbaton_kv_blocks", "KV blocks by state", blocks)
            yield _by_state("kvbaton_engine_requests", "Requests by state", report["requests"])
            # A state that is empty has an age of 0: a series that comes and goes cannot be alerted on.
            ages = dict.fromkeys((*report["requests"], "cached"), 0.0) | report["oldest_s"]
            yield _by_state("kvbaton_oldest_seconds", "How long the oldest request or block is in its state", ages)
            yield GaugeMetricFamily(
                "kvbaton_engine_stuck_seconds",
                "How long requests have been waiting while none was running",
                value=report["engine"]["stuck_s"],
            )
            yield GaugeMetricFamily(
                "kvbaton_engine_turn_seconds",
                "How long the engine has been in the turn it is in",
                value=report["engine"]["turn_s"],
            )
        finished = CounterMetricFamily("kvbaton_engine_finished", "Requests that ended, by reason", labels=["reason"])
        for reason, count in report["finished"].items():
            finished.add_metric([reason], count)
        yield finished
        yield from _handoffs(report)
        for name, value in fabric_counters(report).items():
            yield CounterMetricFamily(f"kvbaton_fabric_{name}", f"Fabric: {name.replace('_', ' ')}", value=value)
        for name, value in fabric_gauges(report).items():
            yield GaugeMetricFamily(f"kvbaton_fabric_{name}", f"Fabric: {name.replace('_', ' ')} now", value=value)


def _handoffs(report: dict[str, Any]) -> Iterable[Metric]:
    counts = GaugeMetricFamily("kvbaton_handoffs", "Open handoffs by side and state", labels=["side", "state"])
    ages = GaugeMetricFamily(
        "kvbaton_handoff_oldest_seconds", "How long the oldest handoff is in its state", labels=["side", "state"]
    )
    for side in ("receiver", "sender"):
        for state, entry in report[side].get("states", {}).items():
            counts.add_metric([side, state], entry["count"])
            ages.add_metric([side, state], entry["oldest_s"])
    yield counts
    yield ages
    yield GaugeMetricFamily(
        "kvbaton_open_leases", "Reservations that wait for KV", value=len(report["receiver"].get("leases", ()))
    )


def _by_state(name: str, text: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family


def registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
