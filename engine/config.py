"""Sizes of one engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Validated on construction; raises ConfigError naming the field."""

    num_blocks: int
    """KV blocks in the pool. A pool of 4 works."""
    max_model_len: int
    """Longest prompt + output in tokens: the model's context, or less."""
    block_size: int = 16
    """Tokens a block."""
    max_batch_tokens: int = 512
    """Tokens one step may compute, decode tokens included: the bound on how long a decode waits."""
    max_num_seqs: int = 64
    """Requests that may run at once."""
    prefix_caching: bool = True
    max_itl_s: float | None = None
    """How long a step with decodes should take at most: prompt tokens are put into it accordingly. None: no limit
    but max_batch_tokens."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "block_size", "max_batch_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_itl_s is not None and not self.max_itl_s > 0:
            raise ConfigError(f"max_itl_s must be positive, got {self.max_itl_s}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that every running request gets a token each step"
            )

    @property
    def capacity_tokens(self) -> int:
        """Longest prompt + output that fits: what admission and `/v1/models` report."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
