"""Which processes `kvbaton serve` starts, with which arguments, ports and cores. Pure but for picking free ports."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.protocol import Role
from services.serve.config import ServeConfig

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    name: str
    arguments: tuple[str, ...]
    url: str
    """Base of its HTTP API (of the gateway: its admin API)."""
    is_worker: bool


@dataclass(frozen=True, slots=True)
class SystemPlan:
    workers: tuple[ProcessPlan, ...]
    gateway: ProcessPlan
    public_url: str
    model_name: str


def plan(config: ServeConfig, model: Path, cores: Sequence[int]) -> SystemPlan:
    roles: list[tuple[str, Role]] = [(f"prefill-{i}", "prefill") for i in range(config.prefill)]
    roles += [(f"decode-{i}", "decode") for i in range(config.decode)]
    roles += [(f"both-{i}", "both") for i in range(config.both)]
    shares = share_cores(cores, len(roles))
    ports = free_ports(len(roles) + 2)
    workers = tuple(
        _worker(config, model, name, role, port, share)
        for (name, role), port, share in zip(roles, ports, shares, strict=False)
    )
    model_name = config.served_model_name or model.resolve().name
    public_port = config.port or ports[-1]
    admin_port = ports[-2]
    gateway = ProcessPlan(
        name="gateway",
        arguments=(
            "gateway",
            *("--listen", f"{config.host}:{public_port}"),
            *("--admin-listen", f"{LOOPBACK}:{admin_port}"),
            *("--model", str(model)),
            *("--served-model-name", model_name),
            *("--workers", ",".join(worker.url for worker in workers)),
            *("--local-prefill-max-tokens", str(config.local_prefill_max_tokens)),
            *("--drain-s", str(config.drain_s)),
            *("--log-level", config.log_level),
        ),
        url=f"http://{LOOPBACK}:{admin_port}",
        is_worker=False,
    )
    host = LOOPBACK if config.host in ("0.0.0.0", "::") else config.host
    return SystemPlan(workers, gateway, f"http://{host}:{public_port}", model_name)


def share_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint cores a worker where there are enough; otherwise none is pinned and each computes on one thread."""
    if num_workers == 0 or len(cores) < num_workers:
        return [()] * num_workers
    each = len(cores) // num_workers
    return [tuple(cores[i * each : (i + 1) * each]) for i in range(num_workers)]


def free_ports(count: int) -> list[int]:
    """Distinct ports nobody listens on at the moment; a worker keeps its port over a restart."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _worker(config: ServeConfig, model: Path, name: str, role: Role, port: int, cores: tuple[int, ...]) -> ProcessPlan:
    arguments: list[str] = [role, "--listen", f"{LOOPBACK}:{port}", "--fabric-listen", f"{LOOPBACK}:0"]
    arguments += ["--model", str(model)]
    passed_on = (
        "served_model_name",
        "device",
        "dtype",
        "quantization",
        "kernels",
        "block_size",
        "num_blocks",
        "kv_cache_gib",
        "max_model_len",
    )
    for field in (*passed_on, "max_batch_tokens", "max_itl_ms", "max_num_seqs", "drain_s", "log_level"):
        value = getattr(config, field)
        if value is not None:
            arguments += ["--" + field.replace("_", "-"), str(value)]
    if cores:
        arguments += ["--cores", ",".join(str(core) for core in cores)]
    else:
        arguments += ["--threads", "1"]
    return ProcessPlan(name, tuple(arguments), f"http://{LOOPBACK}:{port}", is_worker=True)
