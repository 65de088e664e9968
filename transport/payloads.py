"""The payloads of one connection at the receiving side: announced in order, received into staging memory.

A task of its own, so that control messages are heard while payloads queue for memory. Commits pass through here too:
one counts once everything announced before it has arrived. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from transport.errors import TransportError, WireError
from transport.messages import Commit, Segment
from transport.plane import Channel, Connection
from transport.staging import Buffer, StagingPool

logger = logging.getLogger(__name__)
TIMEOUT_S = 10.0
"""An announced payload that has not arrived by then ends its connection: only so is its buffer free again."""
MAX_ANNOUNCED = 64
MAX_RECEIVES = 2
"""Receives posted at once on a connection: the next lands while one is verified and written."""


class Payloads:
    """`on_segment` gets a payload with the buffer it fills the start of, and the pool that the buffer is to be given
    back to; `pool` says from where the next is lent."""

    def __init__(
        self,
        connection: Connection,
        pool: Callable[[], StagingPool],
        on_segment: Callable[[Segment, Buffer, StagingPool], None],
        on_commit: Callable[[Commit], None],
    ) -> None:
        self._connection = connection
        self._pool = pool
        self._on_segment = on_segment
        self._on_commit = on_commit
        self._announced: asyncio.Queue[Segment | Commit] = asyncio.Queue(MAX_ANNOUNCED)
        self._receives: set[asyncio.Task[None]] = set()

    async def announce(self, message: Segment | Commit) -> None:
        """Waits while too many are announced already."""
        await self._announced.put(message)

    async def run(self) -> None:
        """Until the connection ends, or cancelled: then it ends the connection, and returns once no receive is left."""
        try:
            while True:
                message = await self._announced.get()
                num_allowed = MAX_RECEIVES - 1 if isinstance(message, Segment) else 0
                while len(self._receives) > num_allowed:
                    await asyncio.wait(self._receives, return_when=asyncio.FIRST_COMPLETED)
                if isinstance(message, Segment):
                    await self._start(message)
                else:
                    self._on_commit(message)
        except TransportError as error:
            logger.info("payloads from %s ended: %s", self._connection.peer, error)
        finally:
            self._connection.abort()  # which ends the control task and the receives too
            if self._receives:
                await asyncio.wait(self._receives)

    async def _start(self, segment: Segment) -> None:
        """Once there is memory for it."""
        pool = self._pool()
        if not 0 < segment.num_bytes <= pool.buffer_bytes:
            raise WireError(f"a segment of {segment.num_bytes} bytes, the limit is {pool.buffer_bytes}")
        task = asyncio.create_task(self._receive(segment, await pool.lend(), pool))
        self._receives.add(task)
        task.add_done_callback(self._receives.discard)

    async def _receive(self, segment: Segment, buffer: Buffer, pool: StagingPool) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._connection.recv(buffer[: segment.num_bytes], Channel.PAYLOAD)
        except (TransportError, TimeoutError) as error:
            logger.info("a payload from %s was lost: %s", self._connection.peer, error or type(error).__name__)
            # The fabric may still be writing: out of use until the connection is known to be quiet.
            self._connection.abort()
            if await self._connection.settled():
                pool.give_back(buffer)
            else:
                pool.quarantine(buffer)
            return
        self._on_segment(segment, buffer, pool)
