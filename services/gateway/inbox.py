"""Frames of the worker streams of one attempt, merged in the order they arrive. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from services.gateway.worker_client import WorkerLost
from services.protocol import Frame

Side = Literal["prefill", "decode"]
MAX_WAITING = 256
"""Frames a slow reader lets pile up before its workers' streams are no longer read."""


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """No frame comes from this side any more. `message` says what broke, or nothing broke."""

    message: str


Arrival = tuple[Side, "Frame | StreamEnded"]


class Inbox:
    """Several streams write, one reader takes everything that has arrived."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._arrived: asyncio.Future[None] | None = None
        self._taken = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []

    def add(self, side: Side, frames: AsyncGenerator[Frame, None]) -> None:
        """Read these frames until they end. They are closed when the inbox is."""
        self._pumps.append(asyncio.create_task(self._pump(side, frames)))

    def put(self, side: Side, arrival: Frame | StreamEnded) -> None:
        self._arrivals.append((side, arrival))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    async def take_one(self) -> Arrival:
        if not self._arrivals:
            await self._wait()
        return self._arrivals.pop(0)

    async def take(self) -> list[Arrival]:
        """Everything that has arrived, at least one."""
        if not self._arrivals:
            await self._wait()
        arrivals, self._arrivals = self._arrivals, []
        if len(arrivals) >= MAX_WAITING:
            self._taken.set()
        return arrivals

    async def _wait(self) -> None:
        self._arrived = asyncio.get_running_loop().create_future()
        await self._arrived

    def end(self) -> None:
        """Ends both streams at once; they close in their own time."""
        for pump in self._pumps:
            pump.cancel()

    async def close(self) -> None:
        """Ends both streams and waits until they are closed. Idempotent."""
        self.end()
        if self._pumps:
            await asyncio.wait(self._pumps)

    async def _pump(self, side: Side, frames: AsyncGenerator[Frame, None]) -> None:
        async with aclosing(frames):
            try:
                async for frame in frames:
                    self.put(side, frame)
                    if len(self._arrivals) >= MAX_WAITING:
                        self._taken.clear()
                        await self._taken.wait()
            except WorkerLost as error:
                self.put(side, StreamEnded(str(error)))
            else:
                self.put(side, StreamEnded("the stream ended without a last word"))
