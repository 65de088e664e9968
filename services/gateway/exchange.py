"""One HTTP exchange, below any framework: the body in, bounded; a whole or a streamed answer out; the client's leaving.

On the event loop. Pure ASGI, because a disconnect must be seen at once, before the first byte and between any two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError, ClientGone, InvalidRequest, TooLarge


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str, stall_timeout_s: float) -> None:
        self.request_id = request_id
        self.started = False
        """The status line is out: an error can only be an event now."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s

    def header(self, name: str) -> str | None:
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted), None)

    async def body(self, max_bytes: int, timeout_s: float) -> bytes:
        """Raises TooLarge at the first byte too many, before anything is parsed; ClientGone; InvalidRequest (408)
        when it takes too long."""
        length = self.header("content-length")
        if length is not None and length.isdigit() and int(length) > max_bytes:
            raise TooLarge(f"the request body has {length} bytes, the limit is {max_bytes}")
        if self.header("content-encoding") not in (None, "identity"):
            raise InvalidRequest("compressed request bodies are not accepted", status=415, code="unsupported_encoding")
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise TooLarge(f"the request body has more than {max_bytes} bytes")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {timeout_s:.0f} s", status=408) from None

    async def gone(self) -> None:
        """Returns when the client has closed its connection. After the body only."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        await self._start(status, "application/json", {"content-length": str(len(body))} | dict(headers or {}))
        await self._write(body, more=False)

    async def start_events(self) -> None:
        await self._start(
            200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache", "x-accel-buffering": "no"}
        )

    async def events(self, data: bytes) -> None:
        await self._write(data, more=True)

    async def end(self) -> None:
        await self._write(b"", more=False)

    async def fail(self, error: ApiError) -> None:
        """As the whole answer, or as the last event of one that has begun."""
        body = msgspec.json.encode(error.body())
        if not self.started:
            # What is left of the body is not read: the connection cannot carry another request.
            closing = {"connection": "close"} if error.status in (408, 413) else {}
            await self.answer(body, error.status, error.headers() | closing)
            return
        await self._write(b"data: " + body + b"\n\n", more=False)

    async def _start(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        self.started = True
        named = {"content-type": content_type, "x-request-id": self.request_id} | dict(headers)
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, *, more: bool) -> None:
        """Raises ClientGone when the client takes nothing for too long: its buffer is the server's, and bounded."""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientGone(f"took nothing for {self._stall_timeout_s:.0f} s") from None
