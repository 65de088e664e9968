"""The torch side of the engine: one network, its paged KV cache and the sampler behind the Runner protocol.

Built by `load_runner`, then used on the engine thread only. A step is: one forward pass, logits of the rows that are
sampled, one token each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kernels import build
from engine.kernels.network import load_native
from engine.kv_cache import KvCache
from engine.messages import Buffer
from engine.model_config import Dtype, ModelConfig, WeightFormat, load_model_config
from engine.models.checkpoint import Progress
from engine.models.llama import load_llama
from engine.runner import SampledToken, Slots, StepBatch
from engine.sampler import sample, score
from engine.torch_network import TorchNetwork

Kernels = Literal["auto", "native", "torch"]
Quantization = Literal["auto", "none", "int8"]


class Network(Protocol):
    """Weights and forward pass. Holds no state of any request."""

    def logits(self, batch: StepBatch, cache: KvCache) -> torch.Tensor:
        """Write the KV of every token into `cache`. (number of rows, vocab_size), of a float dtype: the rows that
        engine.logit_rows names, in its order."""
        ...


class ModelRunner:
    """Implements engine.runner.Runner."""

    def __init__(self, network: Network, cache: KvCache, weights: str = "") -> None:
        """`weights` describes them to a person."""
        self.weights = weights
        self._network = network
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
        return self._network.logits(batch, self._cache)

    def read_kv(self, slots: Slots, buffer: Buffer) -> None:
        self._cache.read(slots, buffer)

    def write_kv(self, slots: Slots, buffer: Buffer) -> None:
        self._cache.write(slots, buffer)


@dataclass(frozen=True, slots=True)
class Precision:
    """What a model is computed in."""

    dtype: Dtype
    """Of the KV cache, and of weights that are not quantised."""
    weight_format: WeightFormat
    kernels: Any | None
    """The native kernels, or None: plain torch."""


def resolve_precision(
    model: ModelConfig, *, dtype: str, device: str, quantization: Quantization = "auto", kernels: Kernels = "auto"
) -> Precision:
    """Settings to what is used. May build the native kernels. Raises ConfigError.

    `quantization` auto is int8 where nothing else was asked for: on a CPU with native kernels, under dtype auto.
    There it is the fastest of all formats within 1 % of the perplexity of float32 (docs/performance.md).
    """
    resolved = model.resolve_dtype(dtype)
    native, reason = None, f"device is {device}"
    if torch_device(device).type == "cpu" and kernels != "torch":
        loaded = build.load()
        native, reason = (None, loaded) if isinstance(loaded, str) else (loaded, "")
    elif kernels == "torch":
        reason = "kernels is torch"
    if kernels == "native" and native is None:
        raise ConfigError(f"kernels is native, but there are none: {reason}")
    if quantization == "int8" and native is None:
        raise ConfigError(f"quantization int8 needs the native CPU kernels, but there are none: {reason}")
    if quantization == "int8" or (quantization == "auto" and native is not None and dtype == "auto"):
        return Precision(resolved, "int8", native)
    return Precision(resolved, resolved, native)


def load_runner(
    directory: str | Path,
    *,
    dtype: str,
    device: str,
    config: EngineConfig,
    quantization: Quantization = "auto",
    kernels: Kernels = "auto",
    progress: Progress | None = None,
) -> ModelRunner:
    """Load a model and allocate its KV cache. Slow; runs on any thread, before the engine thread starts.

    `dtype` is float32, bfloat16 or auto; `device` is a torch device such as cpu or cuda:0; `progress` gets weight
    bytes (done, total). Raises ConfigError, CheckpointError among them.
    """
    model_config = load_model_config(directory)
    where = torch_device(device)
    if config.max_model_len > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, the model was trained for "
            f"{model_config.max_position_embeddings} positions"
        )
    precision = resolve_precision(model_config, dtype=dtype, device=device, quantization=quantization, kernels=kernels)
    network = _load_network(directory, model_config, precision, where, progress)
    cache = KvCache(model_config, config.num_blocks, config.block_size, precision.dtype, where)
    kind = "native kernels" if precision.kernels is not None else "plain torch"
    return ModelRunner(network, cache, f"{precision.weight_format} on {kind}")


def _load_network(
    directory: str | Path, model: ModelConfig, precision: Precision, device: torch.device, progress: Progress | None
) -> Network:
    dtype: torch.dtype = getattr(torch, precision.dtype)
    if precision.kernels is None:
        return TorchNetwork(load_llama(directory, model, dtype=dtype, device=device, progress=progress))
    return load_native(
        precision.kernels,
        directory,
        model,
        weight_format=precision.weight_format,
        dtype=dtype,
        progress=progress,
    )


def torch_device(name: str) -> torch.device:
    """Raises ConfigError for one that is unknown or absent."""
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
