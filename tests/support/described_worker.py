"""HTTP servers that describe themselves as workers and do nothing else, for tests of the gateway's view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from services.protocol import Fingerprint, WorkerInfo, encode

FINGERPRINT = Fingerprint(wire_version=1, model="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=16)
WITHIN_S = 20.0


@asynccontextmanager
async def worker(role: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """URL of a server that describes itself as a worker, and the fields it says."""
    says: dict[str, Any] = {"role": role, "incarnation": f"{role}-1", "state": "ready"}

    async def info(_: web.Request) -> web.Response:
        fields = says | {"model_name": "m", "fingerprint": FINGERPRINT, "capacity_tokens": 64, "num_blocks": 4}
        return web.Response(body=encode(WorkerInfo(**fields)))

    app = web.Application()
    app.router.add_get("/v1/worker", info)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", says
    finally:
        await runner.cleanup()


async def until(condition: Any, what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - many things change it
            await asyncio.sleep(0.02)
    assert condition(), what
