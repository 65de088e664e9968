"""The oracle: transformers' own Llama, in fp32 on CPU, and a step batch to put the same question to our runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from engine.config import EngineConfig
from engine.kernels import build
from engine.model_runner import Kernels, ModelRunner, Quantization, load_runner
from engine.runner import SampleInput, ScheduledSeq, StepBatch
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def load_reference(directory: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    # Or its end-of-sequence ids would be filled in where a test asks to go on past them.
    model.generation_config = GenerationConfig()
    return model.eval()


@torch.inference_mode()
def reference_logits(model: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """(len(token_ids), vocab_size)"""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(model: LlamaForCausalLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The likeliest continuation, token by token, whatever ends a sequence."""
    ids = torch.tensor([list(prompt)])
    options = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    output: list[int] = result[0, len(prompt) :].tolist()
    assert len(output) == num_tokens
    return output


KERNELS: list[Kernels] = ["torch", "native"]


def skip_without_kernels() -> None:
    """Where there is no compiler, what is left to test is plain torch. Kernels that do not build are a failure."""
    loaded = build.load()
    if isinstance(loaded, str):
        assert build.compiler() is None, loaded
        pytest.skip(f"no native kernels: {loaded}")


def make_runner(
    directory: Path,
    *,
    num_blocks: int = 32,
    block_size: int = 16,
    dtype: str = "float32",
    kernels: Kernels = "auto",
    quantization: Quantization = "none",
) -> ModelRunner:
    if kernels == "native":
        skip_without_kernels()
    config = EngineConfig(num_blocks=num_blocks, block_size=block_size, max_model_len=64)
    return load_runner(directory, dtype=dtype, device="cpu", config=config, kernels=kernels, quantization=quantization)


def scheduled(token_ids: Sequence[int], start: int, block_table: Sequence[int], *, sample: bool = True) -> ScheduledSeq:
    return ScheduledSeq(
        request_id="r",
        token_ids=token_ids,
        start=start,
        block_table=block_table,
        sample=SampleInput(GREEDY, 0, (), ()) if sample else None,
    )


def all_logits(runner: ModelRunner, token_ids: Sequence[int], block_size: int = 16) -> torch.Tensor:
    """Logits at every position, (len(token_ids), vocab_size), one token a step."""
    table = list(range(-(-len(token_ids) // block_size)))
    rows = [
        runner.logits(StepBatch([scheduled([token], position, table)], block_size))
        for position, token in enumerate(token_ids)
    ]
    return torch.cat(rows)


def chunk_logits(
    runner: ModelRunner, token_ids: Sequence[int], chunk: int, block_table: Sequence[int], block_size: int
) -> torch.Tensor:
    """Logits after the last token, (vocab_size,), computed `chunk` tokens a step."""
    logits = torch.empty(0)
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        logits = runner.logits(StepBatch([scheduled(part, start, block_table)], block_size))
    return logits[0]
