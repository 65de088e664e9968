"""The engine alone: model runner and sampler, no scheduler, no server. What one core makes of each format of weights.

Used by bench_engine and, in a process of its own each, by bench_peers: `python -m benchmarks.offline MODEL FORMAT`
prints one JSON line a figure. Random prompts, greedy, end-of-sequence ignored.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.cpu_time import tree_cpu_s
from engine.config import EngineConfig
from engine.model_runner import ModelRunner, load_runner
from engine.runner import SampleInput, ScheduledSeq, StepBatch
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
PREFILL_TOKENS = 1024
CONTEXT_TOKENS = 192
NEW_TOKENS = {1: 64, 8: 32, 32: 16}
"""Decode steps by batch size."""
FORMATS = {
    "torch float32": {"dtype": "float32", "quantization": "none", "kernels": "torch"},
    "torch bfloat16": {"dtype": "bfloat16", "quantization": "none", "kernels": "torch"},
    "float32": {"dtype": "float32", "quantization": "none", "kernels": "native"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none", "kernels": "native"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kernels": "native"},
}
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Figure:
    what: str
    tokens: int
    wall_s: float
    cpu_s: float
    """Of the process tree."""


def load(model: Path, name: str) -> ModelRunner:
    num_blocks = 32 * ((CONTEXT_TOKENS + max(NEW_TOKENS.values())) // BLOCK_SIZE + 1)
    config = EngineConfig(num_blocks=num_blocks, max_model_len=2048, block_size=BLOCK_SIZE, max_batch_tokens=1024)
    return load_runner(model, device="cpu", config=config, **FORMATS[name])  # type: ignore[arg-type]


def measure(runner: ModelRunner, batches: Iterator[int] | tuple[int, ...] = (1, 8, 32)) -> list[Figure]:
    """Each once, in the same order. Warm up before the first call that counts."""
    figures = [_timed("prefill 1024", PREFILL_TOKENS, lambda: prefill(runner, PREFILL_TOKENS))]
    for batch in batches:
        steps = NEW_TOKENS[batch]
        figures.append(_timed(f"decode {batch}", batch * steps, _decode_call(runner, batch, steps)))
    return figures


def prefill(runner: ModelRunner, num_tokens: int) -> None:
    tokens, table = _tokens(num_tokens), list(range(-(-num_tokens // BLOCK_SIZE)))
    for start in range(0, num_tokens, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        sample = SampleInput(_GREEDY, 0, tokens, ()) if start + len(chunk) == num_tokens else None
        runner.execute(StepBatch([ScheduledSeq("p", chunk, start, table, sample)], BLOCK_SIZE))


def decode(runner: ModelRunner, batch: int, steps: int) -> None:
    """From CONTEXT_TOKENS tokens on, whatever KV the blocks hold: its values cost the same."""
    blocks_each = -(-(CONTEXT_TOKENS + steps) // BLOCK_SIZE)
    tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(batch)]
    tokens = _tokens(batch)
    sample = SampleInput(_GREEDY, 0, (), ())
    for step in range(steps):
        seqs = [
            ScheduledSeq(str(i), [token], CONTEXT_TOKENS + step, table, sample)
            for i, (token, table) in enumerate(zip(tokens, tables, strict=True))
        ]
        tokens = [token.token_id for token in runner.execute(StepBatch(seqs, BLOCK_SIZE))]


def _decode_call(runner: ModelRunner, batch: int, steps: int) -> Callable[[], None]:
    return lambda: decode(runner, batch, steps)


def _tokens(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(1000, 40000) for _ in range(count)]


def _timed(what: str, tokens: int, run: Callable[[], None]) -> Figure:
    cpu, wall = tree_cpu_s(), time.perf_counter()
    run()
    return Figure(what, tokens, time.perf_counter() - wall, max(tree_cpu_s() - cpu, 1e-3))


def main() -> None:
    model, name, repeats = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    runner = load(model, name)
    prefill(runner, 64)
    decode(runner, 32, 1)
    for _ in range(repeats):
        for figure in measure(runner):
            print(json.dumps(asdict(figure)), flush=True)


if __name__ == "__main__":
    main()
