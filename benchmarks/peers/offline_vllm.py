"""vLLM for CPUs, compiled: offline_vllm.py MODEL DTYPE. Runs in the environment of `install vllm`."""

from __future__ import annotations

import os
import sys

from child import serve


def main() -> None:
    threads, core = int(os.environ.get("THREADS", "1")), os.environ.get("CORE", "0")
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_OMP_THREADS_BIND=core if threads == 1 else f"0-{threads - 1}",
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    )
    stdout = os.dup(1)
    os.dup2(2, 1)  # what it prints must not mix with our lines
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1],
        dtype=sys.argv[2],
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enforce_eager=os.environ.get("EAGER") == "1",
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    sys.stdout = os.fdopen(stdout, "w")

    def generate(some: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in some], params, use_tqdm=False)

    serve(generate)


if __name__ == "__main__":
    main()
