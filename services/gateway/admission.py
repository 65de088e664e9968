"""First come, first served within a priority when every worker is busy. On the event loop.

A request that finds room never waits here. One that does not joins the queue by priority and age; only the first
asks the workers again, each time something of ours has ended, or a short while has passed (others may share the
workers).
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools

from services.gateway.errors import Overloaded

PRIORITY_SHIFT = 48
"""More requests than this many bits count never arrive."""


class Admission:
    def __init__(self, max_queued: int, retry_s: float) -> None:
        self._max_queued = max_queued
        self._retry_s = retry_s
        self._numbers = itertools.count()
        self._queue: list[Turn] = []

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def ticket(self, priority: int = 0) -> int:
        """A place in the order of priority, the lower the sooner, then of arrival. A request keeps its own through
        all its attempts."""
        return (priority << PRIORITY_SHIFT) + next(self._numbers)

    def turn(self, ticket: int) -> Turn:
        return Turn(self, ticket)

    def capacity_freed(self) -> None:
        """Something of ours has left a worker."""
        self._wake_oldest()

    def _enter(self, turn: Turn) -> None:
        if len(self._queue) >= self._max_queued:
            raise Overloaded("every worker is busy and the queue is full, try again later")
        bisect.insort(self._queue, turn, key=lambda queued: queued.ticket)

    def _leave(self, turn: Turn) -> None:
        self._queue.remove(turn)
        self._wake_oldest()

    def _wake_oldest(self) -> None:
        if self._queue:
            self._queue[0].woken.set()


class Turn:
    """One request's wish to be placed. Use as a context manager around the asking."""

    def __init__(self, admission: Admission, ticket: int) -> None:
        self._admission = admission
        self.ticket = ticket
        self.woken = asyncio.Event()
        self._queued = False

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        if self._queued:
            self._queued = False
            self._admission._leave(self)

    async def wait(self, *, was_refused: bool) -> None:
        """Returns when this request may ask the workers (again). Raises Overloaded when the queue is full."""
        if not self._queued:
            if not was_refused and not self._older_waits():
                return
            self._admission._enter(self)
            self._queued = True
        while self._older_waits():
            self.woken.clear()
            await self.woken.wait()
        if was_refused:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._admission._retry_s):
                    await self.woken.wait()
        self.woken.clear()

    def _older_waits(self) -> bool:
        queue = self._admission._queue
        return bool(queue) and queue[0].ticket < self.ticket
