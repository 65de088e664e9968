"""Clients of a gateway under measurement, in a process of their own. Told what to do by lines of JSON on stdin, each
answered by one on stdout: the name of a method of `Clients` and its arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import aiohttp
import uvloop

from benchmarks.stub_workers import MAX_OUTPUT_TOKENS, read_lines


class Clients:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._num_tokens = 0
        self._streams: list[asyncio.Task[None]] = []

    async def open(self, num_streams: int) -> int:
        """Streams that go on until `close`. Returns once each has its first token."""
        started = [asyncio.Event() for _ in range(num_streams)]
        self._streams = [asyncio.create_task(self._read_on(event)) for event in started]
        waiting = asyncio.gather(*(event.wait() for event in started))
        await asyncio.wait([waiting, *self._streams], return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), "a stream ended before its time"
        return num_streams

    async def tokens(self) -> int:
        """Received by all streams so far."""
        assert not any(stream.done() for stream in self._streams), "a stream ended before its time"
        return self._num_tokens

    async def close(self) -> int:
        for stream in self._streams:
            stream.cancel()
        await asyncio.wait(self._streams)
        return len(self._streams)

    async def requests(self, num_requests: int, concurrency: int, max_pause_s: float) -> dict[str, float]:
        """Answers of two tokens, `concurrency` at a time, each after a pause of a random length. Their times to first
        token by request id."""
        ttft_s: dict[str, float] = {}
        left = iter(range(num_requests))

        async def lane() -> None:
            for _ in left:
                await asyncio.sleep(random.uniform(0, max_pause_s))
                began = time.monotonic()
                async with aclosing(self._chunks(2)) as chunks:
                    async for request_id, _ in chunks:
                        ttft_s.setdefault(request_id, time.monotonic() - began)

        await asyncio.gather(*(lane() for _ in range(concurrency)))
        return ttft_s

    async def _read_on(self, started: asyncio.Event) -> None:
        async with aclosing(self._chunks(MAX_OUTPUT_TOKENS)) as chunks:
            async for _, chunk in chunks:
                started.set()
                self._num_tokens += chunk.count(b"data: ")

    async def _chunks(self, num_tokens: int) -> AsyncIterator[tuple[str, bytes]]:
        body = {"model": "stub", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": num_tokens}
        async with self._session.post(self._url, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            async for chunk in response.content.iter_any():
                yield response.headers["x-request-id"], chunk


async def _main(url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        clients = Clients(session, url)
        async for line in read_lines():
            name, *arguments = json.loads(line)
            answer: Any = await getattr(clients, name)(*arguments)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    uvloop.run(_main(parser.parse_args().url))
