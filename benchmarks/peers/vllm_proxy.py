"""What vLLM's NIXL connector needs in front of it: vllm_proxy.py PREFILL_URL DECODE_URL PORT.

A request goes to the prefill server with max_tokens 1, then to the decode server with the transfer parameters that the
first answered with. Runs in the environment of `install vllm`.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web

PREFILL, DECODE, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])
ASK_FOR_TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SESSION = web.AppKey("session", aiohttp.ClientSession)


async def complete(request: web.Request) -> web.StreamResponse:
    session, body = request.app[SESSION], await request.json()
    headers = {"X-Request-Id": uuid.uuid4().hex}
    async with session.post(PREFILL + request.path, json=_prefill_body(body), headers=headers) as answer:
        prefilled = await answer.json()
        if answer.status != 200:
            return web.json_response(prefilled, status=answer.status)
    body["kv_transfer_params"] = prefilled["kv_transfer_params"]
    async with session.post(DECODE + request.path, json=body, headers=headers) as answer:
        out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await out.prepare(request)
        async for chunk in answer.content.iter_any():
            await out.write(chunk)
        await out.write_eof()
        return out


def _prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    return kept | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK_FOR_TRANSFER}


async def models(request: web.Request) -> web.Response:
    async with request.app[SESSION].get(DECODE + "/v1/models") as answer:
        return web.json_response(await answer.json())


async def health(_: web.Request) -> web.Response:
    return web.Response()


async def with_session(app: web.Application) -> AsyncIterator[None]:
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        app[SESSION] = session
        yield


def main() -> None:
    app = web.Application(client_max_size=1 << 26)
    app.cleanup_ctx.append(with_session)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=PORT, print=None)


if __name__ == "__main__":
    main()
