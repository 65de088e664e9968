"""What a format of weights costs in quality: perplexity of the built-in model on a text that comes with Python.

    python -m benchmarks.bench_perplexity            JSON on stdout

The text is the language reference that `help()` shows (the standard library's pydoc_data.topics); windows of WINDOW
tokens at even distances are decoded token by token, all of them in one batch, through the paged cache, as in serving.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer

from benchmarks import offline
from engine.model_runner import ModelRunner
from engine.runner import SampleInput, ScheduledSeq, StepBatch
from engine.sampling_params import SamplingParams
from services.model_store import ensure_default_model

NUM_WINDOWS = 16
WINDOW = 384
BASE = "float32"
FORMATS = (BASE, "bfloat16", "int8")


def main() -> None:
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    model = ensure_default_model()
    text = "\n".join(topics[name] for name in sorted(topics))
    windows = _windows(model, text)
    base_ppl, base_choice = _perplexity(offline.load(model, BASE), windows)
    figures = []
    for name in FORMATS:
        ppl, choice = (base_ppl, base_choice) if name == BASE else _perplexity(offline.load(model, name), windows)
        agreement = float((choice == base_choice).float().mean())
        figures.append({"format": name, "perplexity": ppl, "ratio": ppl / base_ppl, "same_top_token": agreement})
        print(
            f"| {name} | {ppl:.3f} | {100 * (ppl / base_ppl - 1):+.2f} % | {100 * agreement:.1f} % |", file=sys.stderr
        )
    source = {"python": sys.version.split()[0], "sha256": hashlib.sha256(text.encode()).hexdigest()}
    json.dump(
        {"benchmark": "perplexity", "text": source, "windows": NUM_WINDOWS, "tokens": WINDOW, "figures": figures},
        sys.stdout,
    )


def _windows(model: Path, text: str) -> list[list[int]]:
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    distance = len(ids) // NUM_WINDOWS
    return [ids[i * distance : i * distance + WINDOW] for i in range(NUM_WINDOWS)]


@torch.inference_mode()
def _perplexity(runner: ModelRunner, windows: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Over every token but the first of each window; and the likeliest token at each position."""
    blocks_each = -(-WINDOW // offline.BLOCK_SIZE)
    tables = [list(range(i * blocks_each, (i + 1) * blocks_each)) for i in range(len(windows))]
    sample = SampleInput(SamplingParams(max_tokens=1), 0, (), ())
    loss, choices = 0.0, []
    for position in range(WINDOW - 1):
        seqs = [
            ScheduledSeq(str(i), [window[position]], position, table, sample)
            for i, (window, table) in enumerate(zip(windows, tables, strict=True))
        ]
        logits = runner.logits(StepBatch(seqs, offline.BLOCK_SIZE)).float()
        targets = torch.tensor([window[position + 1] for window in windows])
        loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        choices.append(logits.argmax(-1))
    return math.exp(loss / (len(windows) * (WINDOW - 1))), torch.stack(choices)


if __name__ == "__main__":
    main()
