"""Settings of a worker process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from services import auth
from services.lifecycle import parse_address
from services.protocol import Role


class WorkerConfig(BaseModel):
    """Each field is a flag and an environment variable: see services.settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    role: Role
    model: Path = Field(description="Hugging Face model directory")
    served_model_name: str | None = Field(None, description="name clients use; default: the directory's name")
    listen: str = Field("127.0.0.1:8100", description="host:port of the internal HTTP API; port 0 picks one")
    fabric: Literal["ucx", "inproc"] = Field("ucx", description="what carries KV; inproc only within one process")
    fabric_listen: str = Field("127.0.0.1:0", description="host:port of the fabric listener; port 0 picks one")
    advertise: str | None = Field(
        None,
        description="host that other workers reach this one's fabric at; default: the host of fabric-listen",
    )
    secret: SecretStr | None = Field(None, json_schema_extra={"secret": True})
    secret_file: Path | None = Field(None, description="file with the secret that all processes of a system share")
    device: str = Field("cpu", description="torch device: cpu, cuda, cuda:1")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="weights and KV; auto: as the model says")
    quantization: Literal["auto", "none", "int8"] = Field(
        "auto", description="weights in int8; auto: on CPUs with native kernels, unless a dtype is asked for"
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="CPU kernels: native ones are built on first use; auto: native where they can be built"
    )
    block_size: int = Field(16, ge=1, le=1024, description="tokens in a KV block")
    num_blocks: int | None = Field(None, ge=1, description="KV blocks in the pool; default: from kv-cache-gib")
    kv_cache_gib: float = Field(1.0, gt=0, description="memory for the KV pool where num-blocks is not set")
    max_model_len: int | None = Field(None, ge=1, description="longest prompt + output; default: the model's context")
    max_batch_tokens: int = Field(512, ge=1, description="tokens in one step: the longest a decode waits")
    max_itl_ms: float = Field(
        200.0, ge=0, description="longest a prompt's chunk may stretch a step that others decode in; 0: no limit"
    )
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once")
    max_queued: int = Field(256, ge=0, description="requests that may wait in the engine before new ones are refused")
    prefix_caching: bool = Field(True, description="keep the KV of finished requests for prompts with the same start")
    cores: list[int] = Field([], description="CPU cores to pin to; default: those the process was given")
    threads: int | None = Field(None, ge=1, description="threads of one tensor operation; default: one a core")
    max_segment_bytes: int = Field(4 << 20, ge=4096, description="most KV bytes in one fabric message")
    max_staging_bytes: int = Field(256 << 20, ge=1 << 20, description="most host memory for KV that is on its way")
    fabric_silence_s: float = Field(
        10.0, gt=0, description="seconds without an answer after which prefill gives a decode worker up"
    )
    drain_s: float = Field(30.0, ge=0, description="seconds running requests get after SIGTERM")
    leave_after_s: float = Field(
        5.0,
        ge=0,
        description="seconds of the drain after which streams that still run are moved to other workers",
    )
    test_faults: str | None = Field(
        None,
        description="for tests: faults to inject, see transport.faults; opens /debug/faults; empty: none at first",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")

    @field_validator("listen", "fabric_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        auth.read_secret(self.secret.get_secret_value() if self.secret else None, self.secret_file)
        if self.max_batch_tokens < self.max_num_seqs:
            raise ValueError(
                f"max-batch-tokens ({self.max_batch_tokens}) must be at least max-num-seqs ({self.max_num_seqs})"
            )
        host, _ = parse_address(self.fabric_listen)
        if host in ("0.0.0.0", "::") and not self.advertise:
            raise ValueError("fabric-listen on all interfaces needs advertise: the address that others reach")
        return self

    @property
    def secret_value(self) -> str:
        return auth.read_secret(self.secret.get_secret_value() if self.secret else None, self.secret_file)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name
