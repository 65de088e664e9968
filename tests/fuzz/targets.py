"""What is fed with bytes from the network. Each target raises only for a fault: any bytes are a message or refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services import protocol
from services.protocol import ProtocolError
from transport import messages
from transport.checksum import checksum
from transport.errors import WireError


def control_message(data: bytes) -> None:
    """As it comes, and with a header that is right, so that the body is reached."""
    for framed in (data, messages._HEADER.pack(len(data), checksum(data)) + data):
        try:
            message = messages.decode(framed)
        except WireError:
            continue
        again = messages.encode(message)
        assert messages.encode(messages.decode(again)) == again


def request(data: bytes) -> None:
    for decode in (
        protocol.decode_generate,
        protocol.decode_prefill,
        protocol.decode_hold,
        protocol.decode_ship,
        protocol.decode_worker_info,
        protocol.decode_handoff_state,
    ):
        try:
            message = decode(data)
        except ProtocolError:
            continue
        again = protocol.encode(message)
        assert protocol.encode(decode(again)) == again


def frames(data: bytes) -> None:
    """Cut into chunks by its own first byte."""
    size = 1 + (data[0] if data else 0)

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(1, len(data), size):
            yield data[start : start + size]

    async def read() -> None:
        try:
            async for frame in protocol.iter_frames(chunks()):
                assert isinstance(frame, protocol.Message)
        except ProtocolError:
            pass

    asyncio.run(read())


TARGETS = {"control": control_message, "request": request, "frames": frames}
