"""Nothing behind this is reached without an API key, but for probes. Pure ASGI, on the event loop.

Deny by default: what is open is a list of whole paths, and every other path, method and spelling needs a key. The
identity of the key goes with the request, in its scope. Headers that only our own processes may send are dropped.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.anthropic.api import messages_error
from services.gateway.errors import ApiError, RateLimited, Unauthorized
from services.gateway.tenants.keys import NOBODY, Identity, KeyRing
from services.gateway.tenants.limits import Refusal

OPEN_PATHS = frozenset({"/health", "/ready"})
INTERNAL_PREFIX = b"x-kvbaton-"
_SCOPE_KEY = "kvbaton.identity"
_UNMETERED = frozenset({"GET", "HEAD", "OPTIONS"})


def identity_of(scope: Scope) -> Identity:
    identity: Identity = scope.get(_SCOPE_KEY, NOBODY)
    return identity


class Guard:
    """`keys` None: everybody may do everything."""

    def __init__(self, app: ASGIApp, keys: KeyRing | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [pair for pair in scope["headers"] if not pair[0].startswith(INTERNAL_PREFIX)]
        scope = {**scope, "headers": headers}
        if self._keys is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        identity = self._keys.find(_given_key(headers))
        if identity is None:
            message = "Incorrect API key provided." if _given_key(headers) else "You didn't provide an API key."
            await _refuse(send, scope, Unauthorized(message), {})
            return
        scope[_SCOPE_KEY] = identity
        if scope["method"] in _UNMETERED:
            await self._app(scope, receive, send)
        else:
            await self._metered(identity, scope, receive, send)

    async def _metered(self, identity: Identity, scope: Scope, receive: Receive, send: Send) -> None:
        meter = identity.meter
        refusal = meter.begin(_now())
        if refusal is not None:
            await _refuse(send, scope, rate_limited(refusal), meter.headers(_now()))
            return

        async def send_metered(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = [(name.encode(), value.encode()) for name, value in meter.headers(_now()).items()]
                message = {**message, "headers": [*message.get("headers", ()), *limits]}
            await send(message)

        try:
            await self._app(scope, receive, send_metered)
        finally:
            meter.end()


def rate_limited(refusal: Refusal) -> RateLimited:
    return RateLimited(f"Rate limit reached: {refusal.what}.", retry_after_s=refusal.retry_after_s)


def _given_key(headers: list[tuple[bytes, bytes]]) -> str:
    """OpenAI's clients send a bearer token, Anthropic's x-api-key."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            return value.strip().decode("latin-1")
    return ""


async def _refuse(send: Send, scope: Scope, error: ApiError, headers: dict[str, str]) -> None:
    body = messages_error(error) if scope["path"].startswith("/v1/messages") else error.encoded()
    named = {"content-type": "application/json", "content-length": str(len(body))} | error.headers() | headers
    encoded = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _now() -> float:
    return asyncio.get_running_loop().time()
