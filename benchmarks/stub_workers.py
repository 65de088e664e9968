"""A prefill and a decode worker that compute nothing, for benchmarks of the gateway: one process, the real protocol.

Decode sends one token to every stream at each tick, as an engine does at each step; prefill sends its token at once.
First line on stdout: the workers' URLs. Each line on stdin is answered with the seconds that the stubs themselves
held each request back before its first token, by the gateway's id of the attempt; the end of stdin ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvloop

from services.protocol import Frame
from tests.support.stub_system import SECRET, Server
from tests.support.stub_worker import Behaviour, Call, Fabric, StubWorker

MAX_OUTPUT_TOKENS = 1 << 16
TOKEN_ID = 300


class Tick:
    """Wakes every stream at once, each `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._event = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            event, self._event = self._event, asyncio.Event()
            event.set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass
class TimedStub(StubWorker):
    own_s: Counter[str] = field(default_factory=Counter)
    """Of each attempt: from the call to the first frame, which is the reservation or the first token."""

    async def _frames(self, call: Call, behaviour: Behaviour) -> AsyncIterator[Frame]:
        began = time.monotonic()
        seen = False
        async for frame in super()._frames(call, behaviour):
            yield frame
            if not seen:
                seen = True
                self.own_s[call.request.work.request_id] += time.monotonic() - began


async def _main(tick_s: float) -> None:
    tick, fabric, own_s = Tick(tick_s), Fabric(), Counter[str]()
    output = [TOKEN_ID] * MAX_OUTPUT_TOKENS
    workers = [TimedStub(role, SECRET, fabric, output, own_s=own_s) for role in ("prefill", "decode")]
    workers[1].usual = Behaviour(pause=tick.wait)
    servers = [Server(worker) for worker in workers]
    for server in servers:
        await server.start()
    ticking = asyncio.create_task(tick.run())
    _say([server.url for server in servers])
    async for _ in read_lines():
        _say(own_s)
        own_s.clear()
    ticking.cancel()
    for server in servers:
        await server.stop()


async def read_lines() -> AsyncIterator[str]:
    """Lines of this process's stdin."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in _and_the_end(sys.stdin):
            loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    while line := await lines.get():
        yield line


def _and_the_end(lines: Iterator[str]) -> Iterator[str]:
    yield from lines
    yield ""


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tick-s", type=float, required=True)
    uvloop.run(_main(parser.parse_args().tick_s))
