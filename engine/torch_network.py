"""A Llama decoder in plain torch, for any device: the network where there are no native kernels, and their oracle.

Called by the model runner on the engine thread.
"""

from __future__ import annotations

import torch

from engine.attention import PagedAttention, plan_attention
from engine.kv_cache import KvCache
from engine.logit_rows import logit_rows
from engine.models.llama import LlamaModel
from engine.runner import ScheduledSeq, StepBatch


class TorchNetwork:
    """Implements engine.model_runner.Network."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model

    def logits(self, batch: StepBatch, cache: KvCache) -> torch.Tensor:
        """(number of rows, vocab_size) of the model's dtype, the rows as engine.logit_rows says."""
        model = self._model
        plan = plan_attention(batch.seqs, batch.block_size, model.dtype, model.device)
        ordered = [batch.seqs[i] for i in plan.order]
        token_ids = _tensor([token for seq in ordered for token in seq.token_ids], model.device)
        positions = _tensor([pos for seq in ordered for pos in _positions(seq)], model.device)
        rows = _tensor(logit_rows(batch.seqs, plan.order), model.device)
        return model.forward(token_ids, positions, rows, PagedAttention(cache, plan))


def _positions(seq: ScheduledSeq) -> range:
    return range(seq.start, seq.start + len(seq.token_ids))


def _tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
