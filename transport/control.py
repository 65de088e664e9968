"""One control message over a connection, each way."""

from __future__ import annotations

import numpy as np

from transport import messages
from transport.messages import Control
from transport.plane import Channel, Connection


async def send_control(connection: Connection, message: Control) -> None:
    """Raises ConnectionLost, WireError."""
    await connection.send(np.frombuffer(messages.encode(message), dtype=np.uint8), Channel.CONTROL)


async def recv_control(connection: Connection) -> Control:
    """The next control message. Raises ConnectionLost, WireError."""
    buffer = np.zeros(messages.CONTROL_BYTES, dtype=np.uint8)
    await connection.recv(buffer, Channel.CONTROL)
    return messages.decode(buffer.data)
