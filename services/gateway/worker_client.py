"""Calls to workers over internal HTTP. The only importer of aiohttp in the gateway.

A call that gets no response byte because its pooled connection had been closed is made once more on a fresh one.
On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

import aiohttp

from services import auth
from services.protocol import (
    Frame,
    GenerateRequest,
    HoldRequest,
    PrefillRequest,
    ProtocolError,
    ShipRequest,
    WorkerInfo,
    decode_worker_info,
    encode,
    iter_frames,
)

logger = logging.getLogger(__name__)
_STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError)
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class WorkerLost(Exception):
    """A worker could not be reached, refused the call, or ended a stream without a last word."""


class WorkerClient:
    """Create inside the running loop."""

    def __init__(
        self, secret: str, *, keepalive_s: float, connect_timeout_s: float, info_timeout_s: float, max_connections: int
    ) -> None:
        headers = dict(auth.request_headers(secret))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        pooled = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=keepalive_s)
        fresh = aiohttp.TCPConnector(limit=max_connections, force_close=True)
        self._pooled = aiohttp.ClientSession(connector=pooled, headers=headers, timeout=timeout)
        self._fresh = aiohttp.ClientSession(connector=fresh, headers=headers, timeout=timeout)
        self._info_timeout = aiohttp.ClientTimeout(total=info_timeout_s)

    def generate(self, url: str, request: GenerateRequest) -> AsyncGenerator[Frame, None]:
        """The frames of POST /v1/generate. Raises WorkerLost; closing it before its end cancels the work."""
        return self._stream(f"{url}/v1/generate", encode(request))

    def prefill(self, url: str, request: PrefillRequest) -> AsyncGenerator[Frame, None]:
        """The frames of POST /v1/prefill, as of `generate`."""
        return self._stream(f"{url}/v1/prefill", encode(request))

    def ship(self, url: str, request: ShipRequest) -> AsyncGenerator[Frame, None]:
        """The frames of POST /v1/ship, as of `generate`."""
        return self._stream(f"{url}/v1/ship", encode(request))

    async def hold(self, url: str, request: HoldRequest) -> Frame:
        """The one frame of POST /v1/hold. Raises WorkerLost."""
        async with aclosing(self._stream(f"{url}/v1/hold", encode(request))) as frames:
            async for frame in frames:
                return frame
        raise WorkerLost(f"{url} answered nothing")

    async def info(self, url: str) -> WorkerInfo:
        """Raises WorkerLost."""
        try:
            async with self._fresh.get(f"{url}/v1/worker", timeout=self._info_timeout) as response:
                body = await response.read()
                if response.status != 200:
                    raise WorkerLost(f"{url} answered {response.status}: {_excerpt(body)}")
                return decode_worker_info(body)
        except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
            raise WorkerLost(f"{url}: {error or type(error).__name__}") from error

    async def close(self) -> None:
        await self._pooled.close()
        await self._fresh.close()

    async def _stream(self, url: str, body: bytes) -> AsyncGenerator[Frame, None]:
        try:
            response = await self._post(url, body)
            try:
                chunks = cast("AsyncIterator[bytes]", response.content.iter_any())
                async with aclosing(cast("AsyncGenerator[Frame, None]", iter_frames(chunks))) as frames:
                    async for frame in frames:
                        yield frame
            finally:
                # Not read to its end, the connection is closed, which is what tells the worker to stop.
                response.close()
        except (aiohttp.ClientError, OSError, TimeoutError, ProtocolError) as error:
            raise WorkerLost(f"{url}: {error or type(error).__name__}") from error

    async def _post(self, url: str, body: bytes) -> aiohttp.ClientResponse:
        try:
            response = await self._pooled.post(url, data=body)
        except _UNREACHABLE:
            raise
        except _STALE as error:
            logger.info("%s closed the connection before it answered (%s), trying once more", url, error)
            response = await self._fresh.post(url, data=body)
        if response.status != 200:
            raise WorkerLost(f"{url} answered {response.status}: {_excerpt(await _read(response))}")
        return response


async def _read(response: aiohttp.ClientResponse) -> bytes:
    async with asyncio.timeout(1), response:
        return await response.content.read(1000)


def _excerpt(body: bytes) -> str:
    return body[:200].decode(errors="replace")
