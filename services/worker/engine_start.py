"""Build the engine of a worker: the one module of the services that touches torch. Runs on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineThread
from engine.messages import Event
from services.worker.config import WorkerConfig
from services.worker.main import num_threads


@dataclass(frozen=True, slots=True)
class StartedEngine:
    thread: EngineThread
    engine_config: EngineConfig
    model_fingerprint: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
