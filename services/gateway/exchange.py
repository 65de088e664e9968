"""One HTTP exchange, below any framework: the body in, bounded; a whole or a streamed answer out; the client's leaving.

On the event loop. Pure ASGI, because a disconnect must be seen at once, before the first byte and between any two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError, ClientGone, InvalidRequest, TooLarge
from services.gateway.tenants.guard import identity_of
from services.gateway.tenants.keys import Identity

STALLED = "took nothing for too long"
MAX_DISCARDED_BYTES = 64 << 20
"""Of a body over the limit this much is read and thrown away, so that the client gets to see the answer: to most
of them a connection that is closed while they write is a broken one."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, stall_timeout_s: float) -> None:
        self.request_id = request_id
        self.started = False
        """The status line is out: an error can only be an event now."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None
        """When the event that is being written began to be, while the client does not take it."""

    @property
    def identity(self) -> Identity:
        return identity_of(self._scope)

    def header(self, name: str) -> str | None:
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted), None)

    async def body(self, max_bytes: int, timeout_s: float) -> bytes:
        """Raises TooLarge before anything is parsed, ClientGone, or InvalidRequest (408) when it takes too long."""
        length = self.header("content-length") or ""
        declared = int(length) if length.isdigit() else 0
        asks_first = (self.header("expect") or "").lower() == "100-continue"
        if declared > MAX_DISCARDED_BYTES or (declared > max_bytes and asks_first):
            raise TooLarge(f"the request body has {length} bytes, the limit is {max_bytes}")
        if self.header("content-encoding") not in (None, "identity"):
            raise InvalidRequest("compressed request bodies are not accepted", status=415, code="unsupported_encoding")
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._read(max_bytes)
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {timeout_s:.0f} s", status=408) from None
        if body is None:
            raise TooLarge(f"the request body has more than {max_bytes} bytes")
        return body

    async def _read(self, max_bytes: int) -> bytes | None:
        """None: longer than `max_bytes`."""
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes <= max_bytes:
                chunks.append(chunk)
            else:
                chunks.clear()
            if not message.get("more_body", False) or num_bytes > MAX_DISCARDED_BYTES:
                return b"".join(chunks) if num_bytes <= max_bytes else None

    async def gone(self) -> None:
        """Returns when the client has closed its connection. After the body only."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def stalled(self) -> None:
        """Returns when the client has not taken an event for too long. What it has not taken is the server's to
        hold, and bounded."""
        left_s = self._stall_timeout_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            waited_s = 0.0 if self._writing_since is None else self._loop.time() - self._writing_since
            left_s = self._stall_timeout_s - waited_s

    async def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self._start(status, "application/json", {"content-length": str(len(body))} | dict(headers or {}))
        await self._write_last(body)

    async def start_events(self) -> None:
        await self._start(
            200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def events(self, data: bytes, *, last: bool = False) -> None:
        """Waits while the client does not keep up: see `stalled`, which costs less than a timer an event."""
        self._writing_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._writing_since = None

    async def fail(self, error: ApiError, body: bytes, event: bytes) -> None:
        """With `body` as the whole answer, or `event` as the last one of an answer that has begun."""
        if not self.started:
            # What is left of the body is not read: the connection cannot carry another request.
            closing = {"connection": "close"} if error.status in (408, 413) else {}
            await self.answer(body, error.status, error.headers() | closing)
            return
        await self._write_last(event)

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        named = {"content-type": content_type, "x-request-id": self.request_id} | dict(headers)
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write_last(self, data: bytes) -> None:
        """Raises ClientGone when the client takes nothing for too long."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": False})
        except TimeoutError:
            raise ClientGone(STALLED) from None
