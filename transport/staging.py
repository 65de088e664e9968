"""Staging memory: a bounded set of equal buffers in which segments are gathered, or land.

On the event loop. A buffer is lent to one segment; it comes back only when neither the fabric nor the engine can
touch it any more, so a late write cannot reach another segment's bytes.
"""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]


class StagingPool:
    """Buffers are made on demand, up to `max_bytes` in all (at least two, so that a copy can overlap a transfer)."""

    def __init__(self, buffer_bytes: int, max_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.num_lent = 0
        self._left = max(2, max_bytes // buffer_bytes)
        self._free: list[Buffer] = []
        self._waiting: deque[asyncio.Future[Buffer]] = deque()
        self._quarantined: list[Buffer] = []

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    async def lend(self) -> Buffer:
        """Waits its turn while all are out: that is what holds a sender back."""
        if self._free or self._left:
            self.num_lent += 1
            return self._free.pop() if self._free else self._make()
        turn: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was handed over while the cancel was on its way
                self.give_back(turn.result())
            raise

    def give_back(self, buffer: Buffer) -> None:
        """Nothing can read or write it any more."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(buffer)  # stays lent, to another
                return
        self.num_lent -= 1
        self._free.append(buffer)

    def quarantine(self, buffer: Buffer) -> None:
        """In place of `give_back`, for a buffer whose receive could not be proven to have ended: kept to the end of
        the process, because freed memory that the fabric writes into is worse than lost memory. The pool is smaller
        by it, but never useless: the last two are replaced."""
        self.num_lent -= 1
        self._quarantined.append(buffer)
        if self.num_lent + len(self._free) + self._left < 2:
            self._left += 1
            while self._waiting and self._left:
                turn = self._waiting.popleft()
                if not turn.done():
                    self.num_lent += 1
                    turn.set_result(self._make())

    def _make(self) -> Buffer:
        self._left -= 1
        return np.full(self.buffer_bytes, 0, dtype=np.uint8)  # written, so that first use does not fault pages in

    def snapshot(self) -> dict[str, int]:
        return {
            "staging_bytes": self.num_lent * self.buffer_bytes,
            "quarantined_bytes": self.num_quarantined * self.buffer_bytes,
        }
