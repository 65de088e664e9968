"""A Llama decoder on the native kernels: the whole step is one call.

Built by `load_native`, then called by the model runner on the engine thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.kv_cache import KvCache
from engine.logit_rows import logit_rows
from engine.model_config import ModelConfig, WeightFormat
from engine.models.checkpoint import Progress
from engine.models.llama import load_weights
from engine.models.rotary import inverse_frequencies
from engine.runner import StepBatch


class NativeNetwork:
    """Implements engine.model_runner.Network."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def logits(self, batch: StepBatch, cache: KvCache) -> torch.Tensor:
        """float32 (number of rows, vocab_size), the rows as engine.logit_rows says."""
        rows = logit_rows(batch.seqs, range(len(batch.seqs)))
        ascending = sorted(rows)
        logits: torch.Tensor = self._decoder.step(
            [seq.token_ids for seq in batch.seqs],
            [seq.start for seq in batch.seqs],
            [seq.block_table for seq in batch.seqs],
            ascending,
            cache.data,
            batch.block_size,
        )
        if rows == ascending:
            return logits
        place = {row: at for at, row in enumerate(ascending)}
        return logits[[place[row] for row in rows]]


def load_native(
    kernels: Any,
    directory: str | Path,
    config: ModelConfig,
    *,
    weight_format: WeightFormat,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> NativeNetwork:
    """Weights are read in `dtype` and packed as they are read. `kernels` is what engine.kernels.build.load returned.
    Raises CheckpointError."""

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return kernels.pack_linear(weight_format, weight, None if bias is None else bias.float())

    weights = load_weights(directory, config, pack, dtype=dtype, device=torch.device("cpu"), progress=progress)
    layers = [
        (x.input_norm.float(), x.qkv, x.o, x.post_attention_norm.float(), x.gate_up, x.down) for x in weights.layers
    ]
    decoder = kernels.Decoder(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        inverse_frequencies(config.rope, config.head_dim),
        weights.embed,
        layers,
        weights.norm.float(),
        weights.lm_head,
    )
    return NativeNetwork(decoder)
