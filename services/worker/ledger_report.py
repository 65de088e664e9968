"""What a worker shows of its blocks, requests, leases and transfers: /debug/ledger, and the source of its gauges."""

from __future__ import annotations

import time
from typing import Any

from engine.messages import LedgerSnapshot
from transport.receiver import KvReceiver
from transport.sender import KvSender

BLOCK_STATES = ("free", "cached", "running", "reserved", "held")
_NOW = frozenset({"open", "staging_bytes", "quarantined_bytes", "connections"})
"""Values of a fabric snapshot that go up and down; the other integers only rise."""


def report(
    ledger: LedgerSnapshot | None, receiver: KvReceiver | None, sender: KvSender | None, progress: tuple[float, float]
) -> dict[str, Any]:
    """`progress`: as of EngineThread.progress. Ages are in seconds."""
    now = time.monotonic()
    turn_s, stuck_s = progress
    return {
        "blocks": {name: getattr(ledger, name) for name in ("num_blocks", *BLOCK_STATES)} if ledger else {},
        "requests": dict(ledger.requests) if ledger else {},
        "oldest_s": {state: max(0.0, now - since) for state, since in ledger.oldest.items()} if ledger else {},
        "engine": {"turn_s": turn_s, "stuck_s": stuck_s},
        "receiver": receiver.snapshot() if receiver else {},
        "sender": sender.snapshot() if sender else {},
    }


def fabric_counters(report: dict[str, Any]) -> dict[str, int]:
    """Totals of both sides of the fabric since the start, by name."""
    return {
        f"{side}_{name}": value
        for side in ("receiver", "sender")
        for name, value in report[side].items()
        if isinstance(value, int) and name not in _NOW
    }


def fabric_gauges(report: dict[str, Any]) -> dict[str, int]:
    return {
        f"{side}_{name}": value
        for side in ("receiver", "sender")
        for name, value in report[side].items()
        if name in _NOW
    }
