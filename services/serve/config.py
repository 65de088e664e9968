"""Settings of `kvbaton serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator


class ServeConfig(BaseModel):
    """Each field is a flag and an environment variable: see services.settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path | None = Field(None, description="Hugging Face model directory; default: the built-in small model")
    served_model_name: str | None = Field(None, description="name clients use; default: the directory's name")
    host: str = Field("127.0.0.1", description="address of the public OpenAI API")
    port: int = Field(8000, ge=0, le=65535, description="port of the public OpenAI API; 0 picks one")
    prefill: int = Field(1, ge=0, le=64, description="prefill workers")
    decode: int = Field(1, ge=0, le=64, description="decode workers")
    both: int = Field(0, ge=0, le=64, description="workers that serve whole requests by themselves")
    device: str = Field("cpu", description="torch device of every worker")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="weights and KV; auto: as the model says")
    quantization: Literal["auto", "none", "int8"] = Field("auto", description="int8 weights: see the worker's flag")
    kernels: Literal["auto", "native", "torch"] = Field("auto", description="CPU kernels: see the worker's flag")
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV block")
    num_blocks: int | None = Field(None, ge=1, description="KV blocks of each worker; default: from kv-cache-gib")
    kv_cache_gib: float = Field(1.0, gt=0, description="memory for each worker's KV pool")
    max_model_len: int | None = Field(None, ge=1, description="longest prompt + output; default: the model's context")
    max_batch_tokens: int = Field(512, ge=1, description="tokens in one step of a worker")
    max_itl_ms: float = Field(200.0, ge=0, description="longest step with decodes that prompts may cause; 0: no limit")
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once in a worker")
    local_prefill_max_tokens: int = Field(
        32, ge=0, description="an uncached part up to this many tokens is computed by decode itself"
    )
    secret: SecretStr | None = Field(None, json_schema_extra={"secret": True})
    restarts: int = Field(3, ge=0, description="times a crashed worker is started again")
    start_timeout_s: float = Field(300.0, gt=0, description="longest wait until every process is ready")
    drain_s: float = Field(30.0, ge=0, description="seconds running requests get after Ctrl-C or SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("warning", description="least severe line logged")

    @model_validator(mode="after")
    def _has_workers(self) -> Self:
        if self.decode + self.both == 0:
            raise ValueError("at least one decode worker (--decode) or both worker (--both) is needed")
        return self
