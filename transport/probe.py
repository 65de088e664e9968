"""The start-up probe: KV of a few tokens really goes to oneself over the plane that production will use.

A fabric can accept a registration and fail at the first transfer; a worker that has not passed this is not ready.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from transport.checksum import checksum
from transport.errors import ProbeFailed, TransportError
from transport.layout import KvLayout
from transport.plane import Channel, Connection, Plane

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProbeResult:
    lane: str
    num_bytes: int
    seconds: float


async def probe(plane: Plane, layout: KvLayout, num_tokens: int) -> ProbeResult:
    """Listens for as long as it takes. Raises ProbeFailed, which names the plane and what happened."""
    num_bytes = num_tokens * layout.bytes_per_token
    sent = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    done = asyncio.Event()
    landed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def receive(connection: Connection) -> None:
        buffer = np.zeros(num_bytes, dtype=np.uint8)
        await connection.recv(buffer, Channel.PAYLOAD)
        landed.set_result(checksum(buffer))
        await connection.recv(np.zeros(1, dtype=np.uint8), Channel.CONTROL)
        done.set()

    try:
        async with asyncio.timeout(TIMEOUT_S):
            address = await plane.listen(receive, ephemeral=True)
            try:
                connection = await plane.connect(address)
                started = time.perf_counter()
                await connection.send(sent, Channel.PAYLOAD)
                arrived = await landed
                seconds = time.perf_counter() - started
                lane = await plane.lane(connection)
                await connection.send(np.zeros(1, dtype=np.uint8), Channel.CONTROL)
                await done.wait()
                connection.abort()
            finally:
                await plane.stop_listening(address)
    except TimeoutError as error:
        raise ProbeFailed(f"{plane.name}: {num_bytes} bytes to ourselves did not arrive in {TIMEOUT_S} s") from error
    except TransportError as error:
        raise ProbeFailed(f"{plane.name}: {error}") from error
    if arrived != checksum(sent):
        raise ProbeFailed(f"{plane.name} over {lane}: other bytes arrived than were sent")
    return ProbeResult(lane, num_bytes, seconds)
