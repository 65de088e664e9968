"""llama.cpp through its C API: offline_llama.py FILE.gguf. Runs in the environment of `install llama`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

import llama_cpp as lc
import numpy as np
from child import NEW, serve

MAX_SEQS = max(NEW)


def main() -> None:
    threads = int(os.environ.get("THREADS", "1"))
    lc.llama_backend_init()
    quiet = lc.llama_log_callback(lambda *_: None)
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    model_params = lc.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = lc.llama_model_load_from_file(sys.argv[1].encode(), model_params)
    params = lc.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = MAX_SEQS * 1152, 2048, 512
    params.n_seq_max, params.kv_unified = MAX_SEQS, False
    params.n_threads = params.n_threads_batch = threads
    context = lc.llama_init_from_model(model, params)
    vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    batch = lc.llama_batch_init(2048, 0, 1)

    def decode(tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], wanted: Sequence[int]) -> None:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, positions[i], 1
            batch.seq_id[i][0], batch.logits[i] = seqs[i], wanted[i]
        assert lc.llama_decode(context, batch) == 0

    def best(row: int) -> int:
        return int(np.ctypeslib.as_array(lc.llama_get_logits_ith(context, row), (vocab_size,)).argmax())

    def generate(some: list[list[int]], count: int) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(context), True)
        last, size = [], len(some[0])
        for seq, prompt in enumerate(some):
            decode(prompt, range(size), [seq] * size, [0] * (size - 1) + [1])
            last.append(best(-1))
        for step in range(count - 1):
            decode(last, [size + step] * len(some), range(len(some)), [1] * len(some))
            last = [best(row) for row in range(len(some))]

    serve(generate)


if __name__ == "__main__":
    main()
