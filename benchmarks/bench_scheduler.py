"""Python in a step: microseconds of schedule, batch and update with a runner that computes nothing.

    python -m benchmarks.bench_scheduler            JSON on stdout

CPU time of this thread, median of STEPS steps, everything running and decoding, contexts of 512 tokens and more.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import AddRequest, Buffer, EngineRequest
from engine.runner import SampledToken, Slots, StepBatch
from engine.sampling_params import SamplingParams

STEPS = 200
BATCHES = (1, 32, 256)
PROMPT_TOKENS = 512


class NullRunner:
    kv_bytes_per_token = 1

    def __init__(self) -> None:
        self.started_s = 0.0
        self.ended_s = 0.0

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        self.started_s = time.thread_time()
        sampled = [SampledToken(1, None) for seq in batch.seqs if seq.sample is not None]
        self.ended_s = time.thread_time()
        return sampled

    def read_kv(self, slots: Slots, buffer: Buffer) -> None: ...

    def write_kv(self, slots: Slots, buffer: Buffer) -> None: ...


def step_us(batch: int) -> list[float]:
    blocks_each = (PROMPT_TOKENS + STEPS) // 16 + 2
    config = EngineConfig(
        num_blocks=batch * blocks_each, max_model_len=4096, max_num_seqs=batch, max_batch_tokens=1 << 16, max_itl_s=0.2
    )
    runner = NullRunner()
    engine = Engine(config, runner, vocab_size=50_000)
    sampling = SamplingParams(max_tokens=STEPS + 20, temperature=0.0)
    for i in range(batch):
        prompt = tuple((i * 7919 + j) % 50_000 for j in range(PROMPT_TOKENS))
        engine.handle(AddRequest(EngineRequest(f"r{i}", prompt, sampling)), 0.0)
    for _ in range(10):
        engine.step(time.monotonic)
    gc.collect()
    gc.disable()
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        events = engine.step(time.monotonic)
        engine.ledger()  # as the engine thread does after each step
        times.append(time.thread_time() - start - (runner.ended_s - runner.started_s))
        assert len(events) == batch
    gc.enable()
    return [1e6 * t for t in times]


def main() -> None:
    figures = []
    for batch in BATCHES:
        times = sorted(step_us(batch))
        p99 = times[int(0.99 * len(times))]
        figures.append({"batch": batch, "median_us": statistics.median(times), "p99_us": p99, "steps": STEPS})
        print(f"| {batch} | {statistics.median(times):.0f} | {p99:.0f} |", file=sys.stderr)
    json.dump({"benchmark": "scheduler", "figures": figures}, sys.stdout)


if __name__ == "__main__":
    main()
