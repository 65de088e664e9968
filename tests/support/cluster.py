"""Real processes for tests: workers and a gateway as a person would start them, over real UCX.

Every wait has a deadline. `assert_idle` is the end of every test: the ledger of each worker sums to its pool and
nothing is running, reserved, held or open.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from services import auth
from services.protocol import WorkerInfo, decode_worker_info
from tests.support.netns import Namespace

SECRET = "a secret for tests only"
START_S = 120.0
SETTLE_S = 10.0
ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Process:
    """One kvbaton process; its output goes to a file that a failed wait shows."""

    prefix: Sequence[str] = ()
    """Before the command."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.arguments = arguments
        self._environ = environ or {}
        self._log = tempfile.NamedTemporaryFile(mode="w+b", suffix=".log")  # noqa: SIM115 - lives as long as we do
        self.popen: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        environ = os.environ | {"KVBATON__SECRET": SECRET, "PYTHONUNBUFFERED": "1"} | self._environ
        self.popen = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "services.cli", *self.arguments],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def output(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def send(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def wait(self, timeout_s: float = 15.0) -> int:
        assert self.popen is not None
        return self.popen.wait(timeout_s)

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM and the exit status; SIGKILL when it does not end."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(5)
            raise AssertionError(f"{self.arguments[0]} did not stop:\n{self.output()[-4000:]}") from None

    def close(self) -> None:
        """The log goes with the process."""
        self._log.close()


class WorkerProcess(Process):
    def __init__(
        self,
        role: str,
        model: Path,
        *flags: str,
        environ: dict[str, str] | None = None,
        behind: Namespace | None = None,
    ) -> None:
        """`behind`: the network namespace that it runs in."""
        self.role = role
        host = behind.guest if behind else "127.0.0.1"
        self.prefix = behind.prefix if behind else ()
        self.url = f"http://{host}:{free_port()}"
        listen = self.url.removeprefix("http://")
        if "--dtype" not in flags:
            flags = ("--dtype", "float32", *flags)  # equality is promised there
        super().__init__(role, "--model", str(model), "--listen", listen, "--threads", "1", *flags, environ=environ)

    def get(self, path: str, timeout_s: float = 5.0) -> httpx.Response:
        return httpx.get(self.url + path, headers=dict(auth.request_headers(SECRET)), timeout=timeout_s)

    def put(self, path: str, text: str) -> httpx.Response:
        return httpx.put(self.url + path, content=text, headers=dict(auth.request_headers(SECRET)), timeout=5)

    def info(self) -> WorkerInfo:
        return decode_worker_info(self.get("/v1/worker").content)

    def ledger(self) -> dict[str, Any]:
        report: dict[str, Any] = self.get("/debug/ledger").json()
        return report

    def wait_ready(self, timeout_s: float = START_S) -> None:
        _wait(lambda: self.get("/ready").status_code == 200, timeout_s, self)


class GatewayProcess(Process):
    def __init__(self, model: Path, workers: list[str], *flags: str, url: str | None = None) -> None:
        """`url`: of the public port; default: one of its own."""
        self.url = url or f"http://127.0.0.1:{free_port()}"
        self.admin_url = f"http://127.0.0.1:{free_port()}"
        super().__init__(
            "gateway",
            *("--model", str(model), "--served-model-name", "tiny", "--workers", ",".join(workers)),
            *("--listen", self.url.removeprefix("http://")),
            *("--admin-listen", self.admin_url.removeprefix("http://")),
            *flags,
        )

    def wait_ready(self, timeout_s: float = START_S) -> None:
        _wait(lambda: httpx.get(self.url + "/ready", timeout=5).status_code == 200, timeout_s, self)

    def record(self, request_id: str) -> dict[str, Any]:
        response = httpx.get(f"{self.admin_url}/debug/requests/{request_id}", timeout=5)
        response.raise_for_status()
        record: dict[str, Any] = response.json()
        return record


class Cluster:
    """A gateway in front of workers. Use `running`."""

    def __init__(self, workers: list[WorkerProcess], gateway: GatewayProcess) -> None:
        self.workers = workers
        self.gateway = gateway
        self.client = OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def of_role(self, role: str) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.role == role]

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> httpx.Response:
        return httpx.post(self.gateway.url + path, json=body, timeout=timeout_s)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The parsed answer of /v1/completions, which must be a 200."""
        response = self.post("/v1/completions", {"model": "tiny", "prompt": prompt} | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def records(self) -> list[dict[str, Any]]:
        """What the gateway remembers of its requests, running ones first, the newest before the others."""
        response = httpx.get(self.gateway.admin_url + "/debug/requests", timeout=5)
        records: list[dict[str, Any]] = response.json()
        return records

    def wait_usable(self, timeout_s: float = SETTLE_S) -> None:
        """Until the gateway can use every worker that is alive."""

        def all_usable() -> bool:
            workers = httpx.get(self.gateway.admin_url + "/debug/cluster", timeout=5).json()["workers"]
            alive = {worker.url: worker.info().incarnation for worker in self.workers}
            return all(w["usable"] and w["info"]["incarnation"] == alive[w["url"]] for w in workers)

        wait_until(all_usable, "every worker is usable", self.gateway, timeout_s)

    def assert_idle(self) -> None:
        """Within SETTLE_S nothing of any request is left on any live worker."""
        for worker in self.workers:
            if worker.popen is not None and worker.popen.poll() is None:
                _wait(lambda worker=worker: not leftovers(worker.ledger()), SETTLE_S, worker, worker.ledger)  # type: ignore[misc]


def leftovers(ledger: dict[str, Any]) -> dict[str, Any]:
    """What a quiet worker must not have; empty when the ledger is back at its start."""
    blocks = ledger["blocks"]
    parts = [blocks[state] for state in ("free", "cached", "running", "reserved", "held")]
    assert sum(parts) == blocks["num_blocks"], f"the ledger does not sum to the pool: {ledger}"
    left = {state: blocks[state] for state in ("running", "reserved", "held") if blocks[state]}
    left |= {f"requests {state}": count for state, count in ledger["requests"].items() if count}
    if ledger["open_streams"]:
        left["open_streams"] = ledger["open_streams"]
    for side in ("receiver", "sender"):
        open_handoffs = ledger[side].get("open", 0)
        if open_handoffs:
            left[side] = ledger[side]
    return left


@contextmanager
def running(
    model: Path,
    roles: list[str],
    *,
    worker_flags: dict[str, list[str]] | None = None,
    gateway_flags: list[str] | None = None,
    fixed_fabric_ports: bool = False,
    behind: dict[str, Namespace] | None = None,
) -> Iterator[Cluster]:
    """Processes of these roles and a gateway, ready; stopped at the end, each with status 0 unless it was killed.
    `fixed_fabric_ports`: a worker that is restarted has the same fabric address again. `behind`: where the first
    worker of a role runs; the others can be reached from there."""
    workers: list[WorkerProcess] = []
    near = next(iter(behind.values())).host if behind else "127.0.0.1"
    for role in roles:
        first = role not in {worker.role for worker in workers}
        space = (behind or {}).get(role) if first else None
        host = space.guest if space else near
        fabric = ["--fabric-listen", f"{host}:{free_port() if fixed_fabric_ports else 0}"]
        workers.append(WorkerProcess(role, model, *(worker_flags or {}).get(role, []), *fabric, behind=space))
    gateway = GatewayProcess(model, [worker.url for worker in workers], *(gateway_flags or []))
    cluster = Cluster(workers, gateway)
    try:
        for process in (*workers, gateway):
            process.wait_ready()
        cluster.wait_usable()
        yield cluster
    finally:
        cluster.client.close()
        statuses = {process.arguments[0]: process.stop() for process in (gateway, *workers)}
        for process in (gateway, *workers):
            process.close()
    assert all(status in (0, -signal.SIGKILL) for status in statuses.values()), statuses


def wait_until(condition: Any, what: str | Callable[[], str], process: Process, timeout_s: float = SETTLE_S) -> None:
    """Ask until it is so; AssertionError with `what` and the process's last lines after `timeout_s`."""
    _wait(condition, timeout_s, process, what if callable(what) else lambda: what)


def _wait(condition: Any, timeout_s: float, process: Process, detail: Any = None) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except (httpx.HTTPError, json.JSONDecodeError):
            pass
        assert process.popen is not None
        if process.popen.poll() is not None:
            raise AssertionError(f"{process.arguments[0]} ended:\n{process.output()[-4000:]}")
        if time.monotonic() > deadline:
            shown = detail() if detail else ""
            raise AssertionError(f"not within {timeout_s} s: {shown}\n{process.output()[-4000:]}")
        time.sleep(0.05)
