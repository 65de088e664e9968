"""Served comparisons: the same load on one system after another, in turns."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import load
from benchmarks.peers.systems import Running, kvbaton, running, vllm

Start = tuple[list[str], Mapping[str, str]]
TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.06


async def _closed(system: Running, seed: int, streams: int, num_prompt: int, num_output: int) -> dict[str, Any]:
    async with load.client(system.url, system.model) as on:
        await load.closed_loop(on, seed + 500, 2, 1, 64, 8)  # warm
        before = system.cpu_s()
        answers = await load.closed_loop(on, seed, streams, 1, num_prompt, num_output)
        cpu_s = system.cpu_s() - before
    tokens = sum(answer.num_tokens for answer in answers)
    return {**load.summary(answers), "output_tokens_per_cpu_s": tokens / cpu_s}


async def _goodput(system: Running, seed: int, rates: Sequence[float], count: int) -> dict[str, Any]:
    results = {}
    async with load.client(system.url, system.model) as on:
        await load.closed_loop(on, seed + 500, 2, 1, 64, 8)
        for rate in rates:
            answers = await load.open_loop(on, seed, rate, count, 256, 32)
            results[f"{rate:g}"] = {
                **load.summary(answers),
                "goodput": load.goodput(answers, TTFT_SLO_S, TPOT_SLO_S),
            }
    return {"rates": results, "best_goodput": max(r["goodput"] for r in results.values())}


async def _interference(system: Running, seed: int) -> dict[str, Any]:
    async with load.client(system.url, system.model) as on:
        await load.closed_loop(on, seed + 500, 2, 1, 64, 8)
        streams, long = await load.interference(on, seed, 8, 300, 4, 1500)
    return {"streams": load.summary(streams), "long_ttft_p50_s": load.summary(long)["ttft_p50_s"]}


SCENARIOS: dict[str, Callable[[Running, int], Any]] = {
    "closed 8": lambda system, seed: _closed(system, seed, 8, 256, 64),
    "closed 32": lambda system, seed: _closed(system, seed, 32, 256, 64),
    "goodput": lambda system, seed: _goodput(system, seed, (0.5, 1.0, 2.0), 12),
    "interference": _interference,
}


def starts(model: Path, venvs: Path) -> dict[str, Start]:
    found = {"kvbaton both": kvbaton(model, "both", "0,1"), "kvbaton pair": kvbaton(model, "pair", "0,1")}
    venv = venvs / "vllm"
    if (venv / ".installed-vllm").exists():
        found |= {"vllm both": vllm(venv, model, "both", "0-1"), "vllm pair": vllm(venv, model, "pair", "0 1")}
    return found


def compare(systems: Mapping[str, Start], scenarios: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """One system at a time: some spin while they are idle."""
    rows = []
    for repeat in range(repeats):
        for name, start in systems.items():
            print(f"repeat {repeat}: {name}", file=sys.stderr, flush=True)
            row: dict[str, Any] = {"name": name, "repeat": repeat}
            try:
                with running(*start) as system:
                    for scenario in scenarios:
                        row[scenario] = asyncio.run(SCENARIOS[scenario](system, repeat))
            except RuntimeError as error:
                row["failed"] = str(error)
                print(f"{name}: {error}", file=sys.stderr)
            rows.append(row)
    return rows
