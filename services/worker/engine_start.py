"""Build the engine of a worker: the one module of the services that touches torch. Runs on a thread of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.grammar import Grammars
from engine.loop import EngineThread
from engine.messages import Event
from engine.model_config import load_model_config, num_blocks_for
from engine.model_runner import load_runner
from engine.models.fingerprint import model_fingerprint
from services.worker.config import WorkerConfig
from services.worker.main import num_threads

GIB = 1 << 30
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedEngine:
    thread: EngineThread
    grammars: Grammars
    engine_config: EngineConfig
    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


def start_engine(
    config: WorkerConfig,
    on_events: Callable[[list[Event]], None],
    progress: Callable[[int, int], None],
    before_step: Callable[[], None] | None = None,
) -> StartedEngine:
    """Load the model and start the engine thread. `progress` gets weight bytes (done, total) on this thread.
    Raises EngineError."""
    began, threads = time.monotonic(), num_threads(config)
    torch.set_num_threads(threads)
    model = load_model_config(config.model)
    dtype = model.resolve_dtype(config.dtype)
    context = model.max_position_embeddings
    engine_config = EngineConfig(
        num_blocks=config.num_blocks or num_blocks_for(int(config.kv_cache_gib * GIB), model, config.block_size, dtype),
        max_model_len=min(config.max_model_len or context, context),
        block_size=config.block_size,
        max_batch_tokens=config.max_batch_tokens,
        max_num_seqs=config.max_num_seqs,
        prefix_caching=config.prefix_caching,
        max_itl_s=config.max_itl_ms / 1000 or None,
    )
    fingerprint = model_fingerprint(config.model, model)
    runner = load_runner(
        config.model,
        dtype=config.dtype,
        device=config.device,
        config=engine_config,
        quantization=config.quantization,
        kernels=config.kernels,
        progress=progress,
    )
    grammars = Grammars(config.model / "tokenizer.json", model.vocab_size, model.eos_token_ids)
    engine = Engine(
        engine_config,
        runner,
        vocab_size=model.vocab_size,
        model_fingerprint=fingerprint.encode(),
        grammars=grammars,
    )
    thread = EngineThread(engine, on_events, before_step=before_step)
    thread.start()
    logger.info(
        "model ready in %.1f s: weights %s, KV %s, %d threads", time.monotonic() - began, runner.weights, dtype, threads
    )
    return StartedEngine(
        thread=thread,
        grammars=grammars,
        engine_config=engine_config,
        model_fingerprint=fingerprint,
        dtype=dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
