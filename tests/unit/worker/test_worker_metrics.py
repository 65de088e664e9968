"""Every state has its series, with its age, whether something is in it or not."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import LedgerSnapshot
from services.worker import metrics
from services.worker.ledger_report import report
from transport.transfer import ReceiverState, SenderState


class Side:
    """Of the fabric: only what a snapshot shows."""

    def __init__(self, states: Any, **counts: int) -> None:
        self.states = {state.value: {"count": 0, "oldest_s": 0.0} for state in states}
        self.counts = {"open": 0, "staging_bytes": 0, "quarantined_bytes": 0, "connections": 1} | counts

    def snapshot(self) -> dict[str, Any]:
        return self.counts | {"states": self.states, "leases": []}


def scrape(**ledger: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    fields = {"num_blocks": 9, "free": 9, "cached": 0, "running": 0, "reserved": 0, "held": 0}
    idle = {"requests": dict.fromkeys(("waiting", "running", "reserved", "held"), 0), "oldest": {}}
    snapshot = LedgerSnapshot(**(fields | idle | ledger))
    receiver, sender = Side(ReceiverState, committed=3), Side(SenderState, acked=2)
    found = report(snapshot, receiver, sender, (0.0, 4.5)) | {"finished": {"stop": 1}}  # type: ignore[arg-type]
    page = generate_latest(metrics.registry(metrics.WorkerCollector(lambda: found, lambda: {"role": "decode"})))
    families = text_string_to_metric_families(page.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def at(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_an_idle_worker_has_every_series_at_zero() -> None:
    samples = scrape()
    for state in ("waiting", "running", "reserved", "held", "cached"):
        assert samples[at("kvbaton_oldest_seconds", state=state)] == 0
    for state in ReceiverState:
        assert samples[at("kvbaton_handoffs", side="receiver", state=state.value)] == 0
    assert samples[at("kvbaton_open_leases")] == 0
    assert samples[at("kvbaton_fabric_receiver_committed_total")] == 3
    assert samples[at("kvbaton_fabric_sender_connections")] == 1


def test_the_watchdog_and_the_ages_are_shown() -> None:
    samples = scrape(free=5, held=4, oldest={"held": 0.0})
    assert samples[at("kvbaton_engine_stuck_seconds")] == 4.5
    assert samples[at("kvbaton_oldest_seconds", state="held")] > 0
    assert samples[at("kvbaton_kv_blocks", state="held")] == 4
