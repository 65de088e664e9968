"""Staging memory: a bounded set of equal buffers in which segments are gathered, or land.

On the event loop. A buffer is lent to one segment; it comes back only when neither the fabric nor the engine can
touch it any more, so a late write cannot reach another segment's bytes.
"""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]


class StagingPool:
    """Buffers are made on demand, up to `max_bytes` in all (at least two, so that a copy can overlap a transfer)."""

    def __init__(self, buffer_bytes: int, max_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._left = max(2, max_bytes // buffer_bytes)
        self._free: list[Buffer] = []
        self.num_lent = 0
        self.num_quarantined = 0
        self._returned = asyncio.Condition()

    async def lend(self) -> Buffer:
        """Waits while all are out: that is what holds a sender back."""
        async with self._returned:
            while not self._free and not self._left:
                await self._returned.wait()
            self.num_lent += 1
            if self._free:
                return self._free.pop()
            self._left -= 1
        return np.zeros(self.buffer_bytes, dtype=np.uint8)  # touched now: first use must not fault pages in

    async def give_back(self, buffer: Buffer) -> None:
        async with self._returned:
            self.num_lent -= 1
            self._free.append(buffer)
            self._returned.notify()

    async def discard(self) -> None:
        """In place of `give_back`, for a buffer whose receive could not be proven to have ended: it is never used
        again, and a new one may be made for it."""
        async with self._returned:
            self.num_lent -= 1
            self.num_quarantined += 1
            self._left += 1
            self._returned.notify()
