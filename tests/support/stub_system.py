"""A real gateway over real sockets in front of stub workers, all on one event loop in a thread of its own.

Tests stay plain functions: they call the gateway with any HTTP client and look at the stubs from outside.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import OpenAI
from tokenizers import Tokenizer

from services.gateway.app import create_admin_app, create_public_app
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.main import public_options
from services.lifecycle import Listener, bind
from services.protocol import Role
from tests.support.stub_worker import Fabric, Gate, StubWorker

SECRET = "a secret for tests only"
WAIT_S = 10.0
T = TypeVar("T")


class LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@dataclass
class Server:
    """One uvicorn listener on the loop."""

    app: Any
    port: int = 0
    sock: socket.socket | None = None
    """Bound already; None binds `port`."""
    options: dict[str, Any] = field(default_factory=dict)
    _listener: Listener | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        sock = self.sock or bind(f"127.0.0.1:{self.port}")
        self.sock = None
        self.port = sock.getsockname()[1]
        self._listener = Listener(self.app, "127.0.0.1", self.port, **self.options)
        self._task = asyncio.create_task(self._listener.serve(sockets=[sock]))

    async def stop(self) -> None:
        """Connections are broken off, as by a process that is killed."""
        if self._listener is None or self._task is None:
            return
        for connection in list(self._listener.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        self._listener.should_exit = self._listener.force_exit = True
        await self._task
        self._listener = self._task = None


class StubSystem:
    def __init__(self, thread: LoopThread, gateway: Gateway, public: Server, admin: Server) -> None:
        self.thread = thread
        self.gateway = gateway
        self.workers: list[StubWorker] = []
        self.servers: list[Server] = []
        self.url = public.url
        self.admin_url = admin.url
        self.http = httpx.Client(base_url=public.url, timeout=20)
        self.client = OpenAI(base_url=public.url + "/v1", api_key="none", max_retries=0, timeout=20)
        self.tokenizer = Tokenizer.from_file(str(gateway.config.model / "tokenizer.json"))

    def of_role(self, role: Role) -> list[StubWorker]:
        return [worker for worker in self.workers if worker.role == role]

    def gate(self) -> Gate:
        return Gate(self.thread.loop)

    def says(self, text: str, *, ends: bool = True) -> list[int]:
        """From now on every worker's model answers this text, and then its end token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        for worker in self.workers:
            worker.output = [*ids, 2] if ends else ids
        return ids

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "stub", "prompt": "The capital"} | fields)

    def record(self, response: httpx.Response) -> dict[str, Any]:
        found = httpx.get(f"{self.admin_url}/debug/requests/{response.headers['x-request-id']}", timeout=5)
        found.raise_for_status()
        record: dict[str, Any] = found.json()
        return record

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"kvbaton_gateway_{name}", labels) or 0.0

    def wait(self, condition: Callable[[], object], what: str = "") -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {WAIT_S} s: {what}"
            time.sleep(0.005)

    def one_test(self) -> Iterator[None]:
        """For a fixture around each test: workers that have been asked nothing before, nothing left behind."""
        for worker in self.workers:
            worker.plan.clear()
            worker.calls.clear()
            worker.output_of_choice.clear()
            worker.num_cached_tokens = 0
        yield
        self.assert_idle()

    def assert_idle(self) -> None:
        """Nothing of any request is left: not in the gateway, not on a worker, no task, no queue."""
        self.wait(lambda: all(worker.num_running == 0 for worker in self.workers), "calls on workers")
        self.wait(self.gateway.is_idle, "requests in the gateway")
        self.wait(lambda: not self.gateway.admission.num_queued, "queued requests")
        self.wait(lambda: not self.gateway.pool.num_pending, "text jobs")
        assigned = [worker.num_assigned for worker in self.gateway.cluster.workers()]
        assert sum(assigned) == 0, f"requests still counted as being on workers: {assigned}"


@contextmanager
def stub_system(model: Path, roles: list[Role], **settings: Any) -> Iterator[StubSystem]:
    """`settings` are fields of GatewayConfig."""
    thread = LoopThread()
    fabric = Fabric()
    workers = [StubWorker(role, SECRET, fabric, output=[2]) for role in roles]
    # Between equals the gateway takes the smaller URL, so that a test knows which worker is asked first.
    socks = sorted((bind("127.0.0.1:0") for _ in roles), key=lambda sock: str(sock.getsockname()[1]))
    servers = [Server(worker, sock=sock) for worker, sock in zip(workers, socks, strict=True)]
    cleanup: Coroutine[Any, Any, None] | None = None
    try:
        for server in servers:
            thread.run(server.start())
        config = GatewayConfig(
            model=model,
            served_model_name="stub",
            workers=[server.url for server in servers],
            secret=SECRET,
            **({"poll_s": 0.1, "local_prefill_max_tokens": 0} | settings),
        )
        gateway, public, admin = thread.run(_start(config))
        cleanup = _stop(gateway, public, admin)
        system = StubSystem(thread, gateway, public, admin)
        system.workers, system.servers = workers, servers
        system.wait(lambda: len(gateway.cluster.workers()) == len(roles), "all workers are seen")
        yield system
        system.assert_idle()
        system.client.close()
        system.http.close()
    finally:
        if cleanup is not None:
            thread.run(cleanup)
        for server in servers:
            thread.run(server.stop())
        thread.close()


async def _start(config: GatewayConfig) -> tuple[Gateway, Server, Server]:
    gateway = await Gateway.create(config)
    gateway.start()
    public = Server(create_public_app(gateway), options=public_options(config))
    admin = Server(create_admin_app(gateway))
    await public.start()
    await admin.start()
    return gateway, public, admin


async def _stop(gateway: Gateway, *servers: Server) -> None:
    for server in servers:
        await server.stop()
    await gateway.close()
