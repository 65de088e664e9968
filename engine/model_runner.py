"""The torch side of the engine: one model, its paged KV cache and the sampler behind the Runner protocol.

Built by `load_runner`, then used on the engine thread only. A step is: order the rows, one forward pass, logits of
the rows that are sampled, one token each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.attention import AttentionPlan, PagedAttention, plan_attention
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache import KvCache
from engine.messages import Buffer
from engine.model_config import load_model_config
from engine.models.checkpoint import Progress
from engine.models.llama import LlamaModel, load_llama
from engine.runner import SampledToken, ScheduledSeq, Slots, StepBatch
from engine.sampler import sample, score


class ModelRunner:
    """Implements engine.runner.Runner."""

    def __init__(self, model: LlamaModel, cache: KvCache) -> None:
        self._model = model
        self._cache = cache

    @property
    def kv_bytes_per_token(self) -> int:
        return self._cache.bytes_per_token

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> list[SampledToken]:
        logits = self.logits(batch)
        inputs = [seq.sample for seq in batch.seqs if seq.sample is not None]
        start = len(inputs)
        for seq in batch.seqs:
            if seq.score is not None:
                end = start + len(seq.score.token_ids)
                batch.scored[seq.request_id] = score(logits[start:end], seq.score.token_ids, seq.score.num_top)
                start = end
        return sample(logits[: len(inputs)], inputs)

    @torch.inference_mode()
    def logits(self, batch: StepBatch) -> torch.Tensor:
        """Compute the step. (number of sequences with `sample`, vocab_size), in the order of the batch; after them
        the rows to be scored, in that order too."""
        assert batch.block_size == self._cache.block_size, (batch.block_size, self._cache.block_size)
        model = self._model
        plan = plan_attention(batch.seqs, batch.block_size, model.dtype, model.device)
        ordered = [batch.seqs[i] for i in plan.order]
        token_ids = _tensor([token for seq in ordered for token in seq.token_ids], model.device)
        positions = _tensor([pos for seq in ordered for pos in _positions(seq)], model.device)
        rows = _tensor(_sampled_rows(batch.seqs, plan) + _scored_rows(batch.seqs, plan), model.device)
        return model.forward(token_ids, positions, rows, PagedAttention(self._cache, plan))

    def read_kv(self, slots: Slots, buffer: Buffer) -> None:
        self._cache.read(slots, buffer)

    def write_kv(self, slots: Slots, buffer: Buffer) -> None:
        self._cache.write(slots, buffer)


def _positions(seq: ScheduledSeq) -> range:
    return range(seq.start, seq.start + len(seq.token_ids))


def _sampled_rows(seqs: Sequence[ScheduledSeq], plan: AttentionPlan) -> list[int]:
    """Row of the last token of each sequence with `sample`, in the order of the batch."""
    last_row, row = {}, 0
    for index in plan.order:
        row += len(seqs[index].token_ids)
        last_row[index] = row - 1
    return [last_row[index] for index, seq in enumerate(seqs) if seq.sample is not None]


def _scored_rows(seqs: Sequence[ScheduledSeq], plan: AttentionPlan) -> list[int]:
    """Rows whose next token is to be scored, in the order of the batch."""
    if all(seq.score is None for seq in seqs):
        return []
    first_row, row = {}, 0
    for index in plan.order:
        first_row[index] = row
        row += len(seqs[index].token_ids)
    scored = [(first_row[i] + seq.score.first_row, len(seq.score.token_ids)) for i, seq in enumerate(seqs) if seq.score]
    return [row for first, count in scored for row in range(first, first + count)]


def _tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)


def load_runner(
    directory: str | Path,
    *,
    dtype: str,
    device: str,
    config: EngineConfig,
    progress: Progress | None = None,
) -> ModelRunner:
    """Load a model and allocate its KV cache. Slow; runs on any thread, before the engine thread starts.

    `dtype` is float32, bfloat16 or auto; `device` is a torch device such as cpu or cuda:0; `progress` gets weight
    bytes (done, total). Raises ConfigError, CheckpointError among them.
    """
    model_config = load_model_config(directory)
    resolved = model_config.resolve_dtype(dtype)
    where = _device(device)
    if config.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was trained for "
            f"{model_config.max_position_embeddings} positions"
        )
    torch_dtype = getattr(torch, resolved)
    model = load_llama(directory, model_config, dtype=torch_dtype, device=where, progress=progress)
    return ModelRunner(model, KvCache(model_config, config.num_blocks, config.block_size, resolved, where))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or cuda, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device is {name!r}, but torch sees {count} CUDA devices")
    return device
