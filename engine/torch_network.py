"""A Llama decoder in plain torch, for any device: the network where there are no native kernels, and their oracle.

Called by the model runner on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import AttentionPlan, PagedAttention, plan_attention
from engine.kv_cache import KvCache
from engine.models.llama import LlamaModel
from engine.runner import ScheduledSeq, StepBatch


class TorchNetwork:
    """Implements engine.model_runner.Network."""

    def __init__(self, model: LlamaModel) -> None:
        self._model = model

    def logits(self, batch: StepBatch, cache: KvCache) -> torch.Tensor:
        """(number of sequences with `sample`, vocab_size) of the model's dtype, in the order of the batch."""
        model = self._model
        plan = plan_attention(batch.seqs, batch.block_size, model.dtype, model.device)
        ordered = [batch.seqs[i] for i in plan.order]
        token_ids = _tensor([token for seq in ordered for token in seq.token_ids], model.device)
        positions = _tensor([pos for seq in ordered for pos in _positions(seq)], model.device)
        rows = _tensor(_sampled_rows(batch.seqs, plan), model.device)
        return model.forward(token_ids, positions, rows, PagedAttention(cache, plan))


def _positions(seq: ScheduledSeq) -> range:
    return range(seq.start, seq.start + len(seq.token_ids))


def _sampled_rows(seqs: Sequence[ScheduledSeq], plan: AttentionPlan) -> list[int]:
    """Row of the last token of each sequence with `sample`, in the order of the batch."""
    last_row, row = {}, 0
    for index in plan.order:
        row += len(seqs[index].token_ids)
        last_row[index] = row - 1
    return [last_row[index] for index, seq in enumerate(seqs) if seq.sample is not None]


def _tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
