"""What a client feels when its decode worker is stopped: the longest gap between two tokens of its stream, with the
KV shipped to another decode worker, and with another one computing it again.

Both systems run at once and take turns, one stream at a time. The stream's worker gets SIGTERM once the stream runs,
and is started again before the next turn. Gaps of a stream that nobody disturbs are there to compare with.
"""

from __future__ import annotations

import itertools
import json
import random
import signal
import statistics
import sys
import time
from typing import Any

import httpx

from services.model_store import ensure_default_model
from tests.support.cluster import Cluster, WorkerProcess, running

LENGTHS = (256, 1024)
NUM_OUTPUT = 48
AFTER = 12
"""Tokens before the worker is stopped."""
REPEATS = 3
FLAGS = ["--num-blocks", "300", "--dtype", "float32", "--no-prefix-caching", "--leave-after-s", "0"]
ROLES = ["prefill", "decode", "decode"]


def main() -> int:
    model = ensure_default_model()
    flags = {"prefill": FLAGS, "decode": FLAGS}
    with (
        running(model, ROLES, worker_flags=flags, gateway_flags=_gateway("ship")) as ship,
        running(model, ROLES, worker_flags=flags, gateway_flags=_gateway("recompute")) as recompute,
    ):
        rows = [_compare({"ship": ship, "recompute": recompute}, length) for length in LENGTHS]
    json.dump({"benchmark": "migration", "output_tokens": NUM_OUTPUT, "repeats": REPEATS, "rows": rows}, sys.stdout)
    print()
    return 0


def _gateway(migrate: str) -> list[str]:
    return ["--local-prefill-max-tokens", "0", "--poll-s", "0.2", "--migrate", migrate]


def _compare(systems: dict[str, Cluster], length: int) -> dict[str, Any]:
    rng = random.Random(length)
    gaps: dict[str, list[float]] = {name: [] for name in ("undisturbed", *systems)}
    for repeat in range(REPEATS + 1):
        for name, system in systems.items():
            prompt = [rng.randrange(100, 40_000) for _ in range(length)]
            moved = _longest_gap(system, prompt, stop=True)
            if repeat:  # the first is a warm-up
                gaps[name].append(moved)
        undisturbed = _longest_gap(systems["ship"], prompt, stop=False)
        if repeat:
            gaps["undisturbed"].append(undisturbed)
    ratios = [s / r for s, r in zip(gaps["ship"], gaps["recompute"], strict=True)]
    shown = {f"longest_gap_s, {name}": _spread(values) for name, values in gaps.items()}
    return {"prompt_tokens": length} | shown | {"ship / recompute": _spread(ratios)}


def _longest_gap(system: Cluster, prompt: list[int], *, stop: bool) -> float:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "stream": True}
    arrivals: list[float] = []
    victim: WorkerProcess | None = None
    with httpx.stream(
        "POST", system.gateway.url + "/v1/completions", json=body | {"ignore_eos": True}, timeout=120
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            arrivals.append(time.perf_counter())
            if stop and len(arrivals) == AFTER:
                victim = next(w for w in system.of_role("decode") if w.ledger()["open_streams"])
                victim.send(signal.SIGTERM)
    if victim is not None:
        assert victim.wait(30) == 0
        victim.start()
        victim.wait_ready()
        system.wait_usable(timeout_s=30)
    # Asking which worker has the stream costs this client time of its own: the gap that follows it is not counted.
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    return max(gaps[AFTER:])


def _spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


if __name__ == "__main__":
    sys.exit(main())
