"""What the handoff costs a request: TTFT and end to end of the pair against one `both` worker, on the same cores.

Both systems run at once and are asked in turn, one request at a time, so that a busy neighbour on the machine hits
both alike. Each worker computes on one thread; the idle system costs nothing (that is measured too, as CPU seconds
of a quiet worker). Prompts are random token ids, so nothing is a prefix hit.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from services.model_store import ensure_default_model
from tests.support.cluster import Cluster, running

LENGTHS = (128, 512, 1500)
NUM_OUTPUT = 16
REPEATS = 9
IDLE_S = 5.0
FLAGS = ["--num-blocks", "600", "--dtype", "float32", "--max-batch-tokens", "512", "--no-prefix-caching"]


def main() -> int:
    model = ensure_default_model()
    flags = dict.fromkeys(("prefill", "decode", "both"), FLAGS)
    pair = running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=["--local-prefill-max-tokens", "0"])
    alone = running(model, ["both"], worker_flags=flags)
    with pair as pair_system, alone as both_system:
        idle = {worker.role: _idle_cpu_share(worker) for worker in pair_system.workers}
        rows = [_compare(pair_system, both_system, length) for length in LENGTHS]
    result = {"benchmark": "handoff", "machine": platform.processor() or platform.machine(), "rows": rows}
    json.dump(result | {"idle_cpu_share_of_a_core": idle}, sys.stdout, indent=2)
    print()
    return 0


def _compare(pair: Cluster, both: Cluster, length: int) -> dict[str, Any]:
    rng = random.Random(length)
    samples: dict[str, list[tuple[float, float]]] = {"pair": [], "both": []}
    transfers = []
    for repeat in range(REPEATS + 1):
        for name, system in (("pair", pair), ("both", both)):
            prompt = [rng.randrange(100, 40_000) for _ in range(length)]
            ttft, total, request_id = _ask(system, prompt)
            if repeat:  # the first is a warm-up
                samples[name].append((ttft, total))
                if name == "pair":
                    transfers.append(system.gateway.record(request_id)["transfer"])
    row: dict[str, Any] = {"prompt_tokens": length, "output_tokens": NUM_OUTPUT, "repeats": REPEATS}
    for index, figure in enumerate(("ttft_s", "end_to_end_s")):
        values = {name: [sample[index] for sample in taken] for name, taken in samples.items()}
        row[figure] = {name: _spread(taken) for name, taken in values.items()}
        ratios = [ours / theirs for ours, theirs in zip(values["pair"], values["both"], strict=True)]
        row[figure]["pair / both"] = _spread(ratios)
    row["transfer"] = {
        "bytes": transfers[0]["bytes"],
        "lane": transfers[0]["lane"],
        "GB/s": _spread([t["bytes"] / t["seconds"] / 1e9 for t in transfers]),
        "wait_after_first_token_s": _spread([t["wait_s"] for t in transfers]),
    }
    return row


def _ask(system: Cluster, prompt: list[int]) -> tuple[float, float, str]:
    """(TTFT, end to end, request id) of one streamed completion, at the client."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    started = time.perf_counter()
    first = 0.0
    with httpx.stream("POST", system.gateway.url + "/v1/completions", json=body, timeout=120) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and not first:
                first = time.perf_counter() - started
        return first, time.perf_counter() - started, response.headers["x-request-id"]


def _idle_cpu_share(worker: Any) -> float:
    """CPU seconds a second of a ready worker that nobody asks anything."""
    before, started = worker.ledger()["cpu_s"], time.perf_counter()
    time.sleep(IDLE_S)
    return round((worker.ledger()["cpu_s"] - before) / (time.perf_counter() - started), 4)


def _spread(values: list[float]) -> dict[str, float]:
    digits = 5
    return {
        "min": round(min(values), digits),
        "median": round(statistics.median(values), digits),
        "max": round(max(values), digits),
    }


if __name__ == "__main__":
    assert Path("pyproject.toml").exists(), "run from the project's root"
    sys.exit(main())
