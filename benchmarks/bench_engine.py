"""The engine alone, on one core: prefill and decode for each format of weights, as ratios to plain torch in float32.

    python -m benchmarks.bench_engine            JSON on stdout, the table on stderr

Formats run in alternation, REPEATS times (default 3), in one process pinned to one core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict

import torch

from benchmarks import offline
from services.model_store import ensure_default_model

BASE = "torch float32"


def main() -> None:
    repeats = int(os.environ.get("REPEATS", "3"))
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    model = ensure_default_model()
    runners = {name: offline.load(model, name) for name in offline.FORMATS}
    for runner in runners.values():
        offline.prefill(runner, 64)
        offline.decode(runner, 32, 1)
    figures: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in runners}
    raw = []
    for repeat in range(repeats):
        for name, runner in runners.items():
            for figure in offline.measure(runner):
                figures[name][figure.what].append(figure.tokens / figure.cpu_s)
                raw.append({"repeat": repeat, "format": name, "load": os.getloadavg()[0], **asdict(figure)})
    json.dump({"benchmark": "engine", "core": core, "torch": torch.__version__, "figures": raw}, sys.stdout)
    for name, rows in figures.items():
        print(f"| {name} | " + " | ".join(_cell(rows[w], figures[BASE][w]) for w in rows) + " |", file=sys.stderr)


def _cell(values: list[float], base: list[float]) -> str:
    """Tokens per CPU second, and the ratio to the base in the same repeat: median (min to max)."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{statistics.median(values):.0f}, {statistics.median(ratios):.2f} ({spread})"


if __name__ == "__main__":
    main()
