"""Offline comparison: every engine in a process of its own on the same core, measured in turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START_S = 600
RUN_S = 600

Figures = dict[str, list[float]]
"""what -> [tokens, wall_s, cpu_s]"""


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    command: Sequence[str]
    environ: Mapping[str, str]


class Child:
    """A contender's process, pinned to `core`. Use as a context."""

    def __init__(self, contender: Contender, core: int) -> None:
        environ = {**os.environ, "THREADS": "1", "OMP_NUM_THREADS": "1", "CORE": str(core), **contender.environ}
        self._process = subprocess.Popen(
            ["taskset", "-c", str(core), *contender.command],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if os.environ.get("QUIET", "1") == "1" else None,
            text=True,
        )
        line = self._read()
        if line != "ready":
            self.close()
            raise RuntimeError(f"{contender.name} did not start: {line!r} (QUIET=0 shows why)")

    def run(self) -> Figures:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        figures: Figures = json.loads(self._read())
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def contenders(model: Path, gguf: Path | None, venvs: Path) -> list[Contender]:
    """Whatever is installed."""
    ours = [sys.executable, str(HERE / "offline_kvbaton.py"), str(model)]
    root = {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), str(HERE)))}
    found = [Contender(f"kvbaton {name}", [*ours, name], root) for name in ("float32", "bfloat16", "int8")]
    vllm = venvs / "vllm" / "bin" / "python"
    if vllm.exists():
        # Its scripts directory: it starts compilers by name.
        path = {"PATH": f"{vllm.parent}:{os.environ['PATH']}"}
        found.append(
            Contender("vllm bfloat16", [str(vllm), str(HERE / "offline_vllm.py"), str(model), "bfloat16"], path)
        )
    llama = venvs / "llama" / "bin" / "python"
    if llama.exists() and gguf is not None:
        found.append(Contender(f"llama.cpp {gguf.stem}", [str(llama), str(HERE / "offline_llama.py"), str(gguf)], {}))
    return found


def compare(entries: Sequence[Contender], core: int, repeats: int) -> list[dict[str, Any]]:
    """Every repeat runs every contender once. A process that is not measured waits and computes nothing."""
    rows = []
    with ExitStack() as stack:
        children = []
        for contender in entries:
            print(f"starting {contender.name}", file=sys.stderr, flush=True)
            child = Child(contender, core)
            stack.callback(child.close)
            children.append((contender, child))
        for repeat in range(repeats):
            for contender, child in children:
                figures = child.run()
                rows.append({"name": contender.name, "repeat": repeat, "load": os.getloadavg()[0], "figures": figures})
                print(f"repeat {repeat}: {contender.name}", file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]], base: str) -> list[str]:
    """Markdown: tokens per CPU second, and the ratio to `base` in the same repeat, median (min to max)."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    whats = list(rows[0]["figures"])
    rates = {(row["name"], row["repeat"], what): row["figures"][what][0] / row["figures"][what][2]
             for row in rows for what in whats}  # fmt: skip
    repeats = sorted({row["repeat"] for row in rows})
    lines = ["| | " + " | ".join(whats) + " |", "| --- " * (len(whats) + 1) + "|"]
    for name in names:
        cells = []
        for what in whats:
            values = [rates[name, repeat, what] for repeat in repeats]
            ratios = [rates[name, repeat, what] / rates[base, repeat, what] for repeat in repeats]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{statistics.median(values):.0f}, {spread}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
