"""Prometheus metrics of the gateway. On the event loop.

Gauges are read when they are scraped, so none can keep a value after its cause is gone. Outcomes are `success`,
`client_closed` (499 in logs), `client_stalled`, and the status of the error that the client got: `400`, `503`, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
_TOTAL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class Gauges(Collector):
    """`read` gives (name, help, value), or a list of (labels, value) for a labelled one."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._read()


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvbaton_gateway_{name}", text, value=value)


def labelled_gauge(name: str, text: str, labels: list[str], values: dict[tuple[str, ...], int]) -> Metric:
    family = GaugeMetricFamily(f"kvbaton_gateway_{name}", text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


class GatewayMetrics:
    def __init__(self, read_gauges: Callable[[], Iterable[Metric]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Gauges(read_gauges))
        self.requests = self._counter("requests", "Finished requests", "endpoint", "outcome")
        self.finishes = self._counter("finish_reasons", "Answers by finish reason", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.output_tokens = self._counter("output_tokens", "Output tokens, of unfinished answers too")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens found in a prefix cache")
        self.attempts = self._counter("attempts", "Attempts by the way the prompt was computed", "path")
        self.retries = self._counter("retries", "Attempts after a failed one", "reason")
        self.migrations = self._counter("migrations", "Tries to move a stream off a worker that leaves", "outcome")
        self.busy = self._counter("busy_answers", "Times a worker had no room", "role")
        self.transfer_bytes = self._counter("transfer_bytes", "KV bytes that prefill workers shipped")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS)
        self.itl = self._histogram("inter_token_latency_seconds", "Gap between tokens", _ITL_BUCKETS)
        self.queue = self._histogram("queue_seconds", "Wait for a worker with room", _TTFT_BUCKETS)
        self.total = self._histogram("request_seconds", "Arrival to last byte", _TOTAL_BUCKETS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvbaton_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvbaton_gateway_{name}", text, buckets=buckets, registry=self.registry)
