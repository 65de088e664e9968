"""Starts the processes of one system, waits until each is ready, restarts what crashes, stops all of them.

starting   every process up; one that ends before it was ready ends the whole start
running    one that ends is reported with its last lines and started again, `restarts` times
stopping   the gateway drains first, then the workers; what outlives the drain time is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Mapping

import aiohttp

from services import auth
from services.protocol import ProtocolError, WorkerInfo, decode_worker_info
from services.serve.config import ServeConfig
from services.serve.console import ServeConsole
from services.serve.plan import ProcessPlan, SystemPlan
from services.serve.process import ChildProcess
from services.settings import ENV_PREFIX, SHARED_NAMES, env_name

POLL_S = 0.1
KILL_AFTER_S = 5.0
"""Beyond the drain time, before a process that has not ended is killed."""


class StartFailed(Exception):
    """A process ended, or was not ready in time; the text says which."""


class Supervisor:
    """`failed` is set when a process has crashed more often than it may."""

    def __init__(self, config: ServeConfig, plan: SystemPlan, secret: str, console: ServeConsole) -> None:
        self._config = config
        self._plan = plan
        self._secret = secret
        self._console = console
        self._children: dict[str, ChildProcess] = {}
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._restarts = 0
        self._stopping = False
        self._started = False
        self.failed = asyncio.Event()

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def start(self) -> None:
        """Raises StartFailed. Call `stop` whatever the outcome."""
        for process in (*self._plan.workers, self._plan.gateway):
            await self._spawn(process)
        waits = [asyncio.create_task(self._until_ready(p)) for p in (*self._plan.workers, self._plan.gateway)]
        ends = list(self._watchers.values())
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                pending: set[asyncio.Task[None]] = set(waits)
                while pending:
                    done, _ = await asyncio.wait(pending | set(ends), return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        await task  # an ended watcher raises StartFailed
                    pending -= done
        except TimeoutError:
            raise StartFailed(f"not every process was ready within {self._config.start_timeout_s:.0f} s") from None
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        self._started = True

    async def stop(self) -> None:
        """Nothing is left running when this returns."""
        self._stopping = True
        timeout_s = self._config.drain_s + KILL_AFTER_S
        gateway = self._children.get(self._plan.gateway.name)
        if gateway is not None:
            await gateway.stop(timeout_s)
        await asyncio.gather(*(child.stop(timeout_s) for child in self._children.values()))
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)

    def kill(self) -> None:
        """End every process now; `stop` still has to be awaited."""
        for child in self._children.values():
            child.kill()

    async def _spawn(self, process: ProcessPlan) -> None:
        child = ChildProcess(process.name, process.arguments, self._environ(), self._console.log)
        self._children[process.name] = child
        await child.start()
        self._watchers[process.name] = asyncio.create_task(self._watch(process, child))

    def _environ(self) -> Mapping[str, str]:
        """Ours, less the settings that were meant for `serve` itself: each child gets its own as flags."""
        kept = {env_name(name) for name in SHARED_NAMES}
        environ = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX) or k in kept}
        return environ | {env_name("secret"): self._secret, "PYTHONUNBUFFERED": "1"}

    async def _watch(self, process: ProcessPlan, child: ChildProcess) -> None:
        status = await child.wait()
        if self._stopping:
            return
        self._console.crashed(process.name, status, list(child.last_lines))
        if not self._started:
            raise StartFailed(f"{process.name} ended before it was ready")
        if self._restarts >= self._config.restarts:
            self.failed.set()
            return
        self._restarts += 1
        await self._spawn(process)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._until_ready(process)

    async def _until_ready(self, process: ProcessPlan) -> None:
        started = time.monotonic()
        headers = auth.request_headers(self._secret)
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                text = await (self._worker_ready if process.is_worker else self._gateway_ready)(session, process)
                if text is not None:
                    self._console.ready(process.name, f"{text} after {time.monotonic() - started:.1f} s")
                    return
                await asyncio.sleep(POLL_S)

    async def _worker_ready(self, session: aiohttp.ClientSession, process: ProcessPlan) -> str | None:
        info = await _fetch_info(session, process.url)
        if info is None or info.state == "failed":
            return None
        if info.state != "ready":
            self._console.loading(process.name, info.load_progress)
            return None
        return f"{process.url}, {info.num_blocks} blocks of {info.block_size} tokens, fabric over {info.lane}"

    async def _gateway_ready(self, session: aiohttp.ClientSession, process: ProcessPlan) -> str | None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
            async with session.get(f"{process.url}/debug/cluster") as response:
                workers = (await response.json())["workers"] if response.status == 200 else []
                # Not before it has seen every worker: a request now would go another way than one in a second.
                if workers and all(worker["usable"] for worker in workers):
                    return f"{self._plan.public_url}/v1"
        return None


async def _fetch_info(session: aiohttp.ClientSession, url: str) -> WorkerInfo | None:
    try:
        async with session.get(f"{url}/v1/worker") as response:
            return decode_worker_info(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ProtocolError):
        return None
