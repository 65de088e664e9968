"""CPU that one gateway process spends on a streamed token and on a request, with stub workers. JSON to stdout.

The gateway runs in a process of its own, as a person would start it; workers and clients share this one. A stub
decode worker sends one token to every stream at each tick, as an engine does at each step, so that tokens arrive
one frame at a time. Reported is the gateway's CPU time, which a noisy machine changes less than wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.support.stub_system import SECRET, Server
from tests.support.stub_worker import Behaviour, Fabric, StubWorker
from tests.support.text_model import make_text_model

TICK_S = 0.01
WARM_UP_TOKENS = 50
READY_S = 60.0


class Tick:
    """Wakes every stream at once, each `TICK_S`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            event, self._event = self._event, asyncio.Event()
            event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(frozen=True)
class Cpu:
    """CPU seconds, apart for our own code and the kernel's: waking a sleeping peer is charged to who wrote."""

    user_s: float
    system_s: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(self.user_s - before.user_s, self.system_s - before.system_s)

    def us_per(self, count: int, name: str) -> dict[str, float]:
        total = self.user_s + self.system_s
        return {
            f"cpu_us_per_{name}": round(total / count * 1e6, 1),
            f"user_us_per_{name}": round(self.user_s / count * 1e6, 1),
        }


@dataclass(frozen=True)
class Stand:
    """A running gateway process, and what is in front of and behind it."""

    session: aiohttp.ClientSession
    url: str
    process: psutil.Process
    decode: StubWorker
    tick: Tick

    def cpu(self) -> Cpu:
        times = self.process.cpu_times()
        return Cpu(times.user, times.system)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,32", help="numbers of concurrent streams")
    parser.add_argument("--tokens", type=int, default=4000, help="output tokens of each measurement, at least")
    parser.add_argument("--requests", type=int, default=300, help="short requests of the measurement per request")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_text_model(Path(folder) / "m", context_tokens=1 << 20)
        workers = [StubWorker(role, SECRET, Fabric(), output=[300] * (1 << 16)) for role in ("prefill", "decode")]
        workers[0].fabric = workers[1].fabric
        servers = [Server(worker) for worker in workers]
        for server in servers:
            await server.start()
        tick = Tick()
        ticking = asyncio.create_task(tick.run())
        gateway = start_gateway(model, [server.url for server in servers])
        try:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                stand = Stand(session, gateway.url, psutil.Process(gateway.popen.pid), workers[1], tick)
                await wait_ready(stand)
                print(json.dumps(await measure(stand, args), indent=2))
        finally:
            gateway.popen.terminate()
            gateway.popen.wait(20)
            ticking.cancel()
            for server in servers:
                await server.stop()


async def measure(stand: Stand, args: argparse.Namespace) -> dict[str, Any]:
    await stream(stand, WARM_UP_TOKENS)
    streams = [int(count) for count in args.streams.split(",")]
    return {
        "benchmark": "gateway",
        "tick_s": TICK_S,
        "streaming": [await per_token(stand, count, -(-args.tokens // count)) for count in streams],
        "per_request": await per_request(stand, args.requests),
        "idle_cores": await idle(stand),
        "python_loop_ns": python_loop_ns(),
    }


def python_loop_ns() -> float:
    """CPU time of one turn of an empty Python loop here and now, to compare runs by: a neighbour on the same core
    makes every figure above grow alike."""
    began = time.process_time()
    for _ in range(3_000_000):
        pass
    return round((time.process_time() - began) / 3_000_000 * 1e9, 1)


async def per_token(stand: Stand, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """Every stream in full flow; the requests' own cost is in it, spread over their tokens."""
    before, began = stand.cpu(), time.monotonic()
    await asyncio.gather(*(stream(stand, num_tokens) for _ in range(num_streams)))
    used, wall_s = stand.cpu().since(before), time.monotonic() - began
    return {
        "streams": num_streams,
        "tokens_per_stream": num_tokens,
        **used.us_per(num_streams * num_tokens, "token"),
        "wall_s": round(wall_s, 2),
    }


async def per_request(stand: Stand, num_requests: int) -> dict[str, Any]:
    """A pair's whole passage with two output tokens, one after another."""
    before = stand.cpu()
    for _ in range(num_requests):
        await stream(stand, 2)
    return {"requests": num_requests, **stand.cpu().since(before).us_per(num_requests, "request")}


async def idle(stand: Stand) -> float:
    before = stand.cpu()
    await asyncio.sleep(3)
    used = stand.cpu().since(before)
    return round((used.user_s + used.system_s) / 3, 4)


async def stream(stand: Stand, num_tokens: int) -> None:
    stand.decode.plan.append(Behaviour(pause=stand.tick.wait))
    body = {
        "model": "stub",
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    async with stand.session.post(stand.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        last = b""
        async for chunk in response.content.iter_any():
            last = chunk
        assert last.endswith(b"data: [DONE]\n\n"), last


@dataclass(frozen=True)
class GatewayProcess:
    url: str
    popen: subprocess.Popen[bytes]


def start_gateway(model: Path, workers: list[str]) -> GatewayProcess:
    ports = [free_port(), free_port()]
    command = [sys.executable, "-m", "services.cli", "gateway", "--model", str(model), "--served-model-name", "stub"]
    command += ["--workers", ",".join(workers), "--local-prefill-max-tokens", "0", "--log-level", "warning"]
    command += ["--listen", f"127.0.0.1:{ports[0]}", "--admin-listen", f"127.0.0.1:{ports[1]}"]
    popen = subprocess.Popen(command, env=os.environ | {"KVBATON__SECRET": SECRET})
    return GatewayProcess(f"http://127.0.0.1:{ports[0]}", popen)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def wait_ready(stand: Stand) -> None:
    async with asyncio.timeout(READY_S):
        while True:
            try:
                async with stand.session.get(stand.url + "/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
