"""Every answer of ours names its request in X-Request-Id, wrong paths and faults of ours included.

Pure ASGI, because a middleware that wraps the body iterator hides a client's leaving from the application. The id
is our own; what a client calls its request is shown in logs and records only.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import Failed

logger = logging.getLogger(__name__)
HEADER = b"x-request-id"


class RequestIds:
    """Also the last resort: an exception that nobody caught becomes an error object, if nothing has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                headers = list(message.get("headers", ()))
                if not any(name == HEADER for name, _ in headers):
                    headers.append((HEADER, f"req-{uuid.uuid4().hex}".encode()))
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await _send_failure(send_named)


async def _send_failure(send: Send) -> None:
    error = Failed("internal error")
    body = msgspec.json.encode(error.body())
    headers: Any = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
