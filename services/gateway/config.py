"""Settings of the gateway process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from services import auth
from services.lifecycle import parse_address


class GatewayConfig(BaseModel):
    """Each field is a flag and an environment variable: see services.settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(description="Hugging Face model directory: tokenizer, chat template and config are read")
    served_model_name: str | None = Field(None, description="name clients use; default: the directory's name")
    listen: str = Field("127.0.0.1:8000", description="host:port of the public OpenAI API; port 0 picks one")
    reuse_port: bool = Field(False, description="let other gateway processes listen on the same port")
    admin_listen: str = Field("127.0.0.1:8001", description="host:port of the admin API (metrics, debug)")
    workers: list[str] = Field([], description="base URLs of all workers, whatever their role: http://host:port")
    worker_selector: str | None = Field(
        None, description="instead of workers: Kubernetes label selector of the pods that are workers"
    )
    worker_namespace: str | None = Field(None, description="Kubernetes namespace of those pods")
    api_credentials: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="folder with the token and ca.crt for the Kubernetes API",
    )
    secret: SecretStr | None = Field(None, json_schema_extra={"secret": True})
    secret_file: Path | None = Field(None, description="file with the secret that all processes of a system share")
    public_metrics: bool = Field(True, description="serve /metrics on the public port too")

    chat_template: Path | None = Field(None, description="Jinja chat template to use in place of the model's own")
    tool_parser: Literal["auto", "hermes", "llama3", "none"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template shows"
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto", description="how the model marks its reasoning; auto: as its chat template shows"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="auto: the model's generation_config.json gives defaults for temperature, top_p, ..."
    )

    api_keys_file: Path | None = Field(
        None, description="TOML file of API keys, read again when it changes; without one everybody is let in"
    )
    tls_cert: Path | None = Field(None, description="certificate chain of the public port, PEM; needs tls-key")
    tls_key: Path | None = Field(None, description="private key of the public port, PEM")
    cors_origins: list[str] = Field([], description="origins whose pages may call the API; * for all")

    max_body_bytes: int = Field(8 << 20, ge=1024, description="longest request body; a longer one gets 413")
    body_timeout_s: float = Field(30.0, gt=0, description="seconds a client gets to send its whole body")
    request_timeout_s: float = Field(
        600.0, gt=0, description="seconds from arrival to the last token, retries included"
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="seconds a streaming client may take to accept a write before it is cut off"
    )
    threads: int = Field(2, ge=1, le=64, description="threads for tokenising, templates and large bodies")
    max_pending_text_jobs: int = Field(256, ge=1, description="text jobs that may wait for a thread; more get 503")
    prepare_timeout_s: float = Field(
        30.0, gt=0, description="longest a body may take to become token ids: parsing, template, tokenising"
    )

    max_attempts: int = Field(3, ge=1, le=16, description="times one request may be tried, the first time included")
    max_queued_requests: int = Field(
        1024, ge=0, description="requests that may wait for a free worker; more get 503 with Retry-After"
    )
    busy_retry_s: float = Field(
        0.1, gt=0, description="seconds after which a busy system is asked again when nothing has ended here"
    )
    recovery_wait_s: float = Field(
        5.0, ge=0, description="seconds a request whose worker was lost waits for another one to be there"
    )
    local_prefill_max_tokens: int = Field(
        32, ge=0, description="an uncached part up to this many tokens is computed by decode itself"
    )
    migrate: Literal["ship", "recompute", "wait"] = Field(
        "ship",
        description="streams of a decode worker that is being stopped: ship their KV to another one, have another one "
        "compute it again, or let them run until the worker has gone",
    )
    lease_s: float = Field(30.0, gt=0, description="seconds decode keeps a reservation without hearing from prefill")

    poll_s: float = Field(1.0, gt=0, description="seconds between two looks at each worker")
    poll_timeout_s: float = Field(2.0, gt=0, description="seconds a worker gets to describe itself")
    lost_after_s: float = Field(
        5.0, gt=0, description="seconds of silence after which a worker's requests are given to another one"
    )
    connect_timeout_s: float = Field(3.0, gt=0, description="seconds a worker gets to accept a connection")
    keepalive_s: float = Field(
        15.0, gt=0, description="seconds an idle connection to a worker is kept; must be below the worker's own limit"
    )
    max_connections: int = Field(2048, ge=1, description="connections to all workers together")

    max_timelines: int = Field(1000, ge=0, description="finished requests whose timeline the admin API still shows")
    leave_s: float = Field(
        0.0, ge=0, description="seconds after SIGTERM in which requests are still taken: until a load balancer noticed"
    )
    drain_s: float = Field(30.0, ge=0, description="seconds running requests get after that")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe line logged")

    @field_validator("listen", "admin_listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parse_address(value)
        return value

    @field_validator("workers")
    @classmethod
    def _are_urls(cls, value: list[str]) -> list[str]:
        urls = [url.rstrip("/") for url in value]
        for url in urls:
            parts = urlsplit(url)
            if parts.scheme != "http" or not parts.hostname or parts.path or parts.query or parts.username:
                raise ValueError(f"expected http://host:port, got {url!r}")
        if len(set(urls)) != len(urls):
            raise ValueError("a worker is named twice")
        return urls

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls-cert and tls-key come together")
        if bool(self.workers) == bool(self.worker_selector):
            raise ValueError("give either workers or worker-selector: where the gateway finds its workers")
        if self.worker_selector and not self.worker_namespace:
            raise ValueError("worker-selector needs worker-namespace")
        auth.read_secret(self.secret.get_secret_value() if self.secret else None, self.secret_file)
        return self

    @property
    def secret_value(self) -> str:
        return auth.read_secret(self.secret.get_secret_value() if self.secret else None, self.secret_file)

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name
