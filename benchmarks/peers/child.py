"""One engine under measurement, in a process of its own: the protocol between it and bench-peers.

Runs in the peer's virtual environment, so nothing but the standard library is imported here. A child prints "ready"
when its model is loaded and warm; for every line "run" on standard input it measures once and prints one JSON line:
{"prefill 1024": [tokens, wall_s, cpu_s], "decode 1": ..., ...}. Prompts are random, decoding is greedy and goes on past
the end of sequence. Decode is a generation of NEW + 1 tokens less one of a single token.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], None]
"""generate(prompts, n): n greedy tokens for every prompt, all at once."""

PREFILL, CONTEXT = 1024, 192
NEW = {1: 64, 8: 64, 32: 64}
"""Tokens a sequence, by batch size: enough for the prompts, which are subtracted, not to drown them."""


def prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(length * 1000 + count)
    return [[rng.randint(1000, 40000) for _ in range(length)] for _ in range(count)]


def tree_cpu_s() -> float:
    """CPU seconds of this process and its descendants, from /proc."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        ticks[int(pid)] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(int(pid))
    todo, total = [os.getpid()], 0
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")


def measure(generate: Generate) -> dict[str, tuple[int, float, float]]:
    def timed(some: list[list[int]], count: int) -> tuple[float, float]:
        cpu, wall = tree_cpu_s(), time.perf_counter()
        generate(some, count)
        return time.perf_counter() - wall, tree_cpu_s() - cpu

    figures = {"prefill 1024": (PREFILL, *timed(prompts(1, PREFILL), 1))}
    for batch, count in NEW.items():
        some = prompts(batch, CONTEXT)
        wall_1, cpu_1 = timed(some, 1)
        wall_n, cpu_n = timed(some, count + 1)
        figures[f"decode {batch}"] = (batch * count, max(wall_n - wall_1, 1e-3), max(cpu_n - cpu_1, 1e-2))
    return figures


def serve(generate: Generate) -> None:
    generate(prompts(2, 64), 2)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "run":
            print(json.dumps(measure(generate)), flush=True)
