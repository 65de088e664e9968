"""An ASGI response that streams frames, and cancels their source the moment the caller closes the connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Receive, Scope, Send

from services.protocol import FRAMES_MEDIA_TYPE, Failure, Frame, encode_frame

logger = logging.getLogger(__name__)


class FrameStream:
    """Runs `frames` to its end, or cancels it when the caller leaves. An exception in it becomes a Failure frame:
    no stream ends without a last word."""

    def __init__(self, frames: AsyncGenerator[Frame, None]) -> None:
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", FRAMES_MEDIA_TYPE.encode())],
            }
        )
        pump = asyncio.create_task(self._pump(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not pump.done():
                pump.cancel()
            # Not abandoned: the source's finally clauses give the blocks back.
            await asyncio.wait({pump, gone})

    async def _pump(self, send: Send) -> None:
        try:
            async for frame in self._frames:
                await send(_body(encode_frame(frame), more=True))
        except Exception as error:
            logger.exception("a request failed")
            await send(_body(encode_frame(Failure(message=str(error) or repr(error), kind="internal")), more=True))
        finally:
            await self._frames.aclose()
        await send(_body(b"", more=False))


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
