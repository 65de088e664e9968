"""Threads for work that would hold up the event loop: tokenising, templates, large JSON bodies.

Owned by the gateway. What waits is bounded, and a caller that gives up does not take the thread with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from services.gateway.errors import DeadlinePassed, Overloaded

P = ParamSpec("P")
T = TypeVar("T")


class WorkPool:
    def __init__(self, threads: int, max_pending: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._max_pending = max_pending
        self.num_pending = 0
        """Jobs queued or running."""

    async def run(self, timeout_s: float, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises Overloaded when too many jobs wait, DeadlinePassed after `timeout_s`; the job may run on then."""
        if self.num_pending >= self._max_pending:
            raise Overloaded("too many prompts are waiting to be tokenised, try again later")
        loop = asyncio.get_running_loop()
        future = self._executor.submit(job, *args, **kwargs)
        self.num_pending += 1
        future.add_done_callback(lambda _: _call_on(loop, self._ended))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise DeadlinePassed(f"the prompt was not ready within {timeout_s:.1f} s") from None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _ended(self) -> None:
        self.num_pending -= 1


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody counts any more
        loop.call_soon_threadsafe(callback)
