"""Our engine, scheduler included: offline_kvbaton.py MODEL FORMAT (a format of benchmarks.offline)."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import torch
from child import serve

from benchmarks.offline import FORMATS
from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import AddRequest, EngineRequest
from engine.model_config import load_model_config
from engine.model_runner import load_runner
from engine.sampling_params import SamplingParams


def main() -> None:
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    model, name = Path(sys.argv[1]), sys.argv[2]
    config = EngineConfig(
        num_blocks=1024, max_model_len=2048, max_batch_tokens=1024, max_num_seqs=64, prefix_caching=False
    )
    runner = load_runner(model, device="cpu", config=config, **FORMATS[name])  # type: ignore[arg-type]
    engine = Engine(config, runner, vocab_size=load_model_config(model).vocab_size)
    numbers = itertools.count()

    def generate(some: list[list[int]], count: int) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        for prompt in some:
            engine.handle(AddRequest(EngineRequest(str(next(numbers)), tuple(prompt), sampling)), time.monotonic())
        while not engine.is_empty():
            engine.step(time.monotonic)

    serve(generate)


if __name__ == "__main__":
    main()
