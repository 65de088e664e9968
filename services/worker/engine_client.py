"""The event loop's side of the engine thread: commands in, each request's events out on a queue of its own.

Owned by the worker's event loop. The engine thread calls `deliver` alone, once a step; everything else runs on
the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine import messages
from engine.loop import EngineThread
from engine.messages import Buffer, Command, EngineFailed, Finished, KvRead, KvWritten, Released

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """Put on a request's queue when its time is over; the request is still running."""

    deadline_s: float


class EngineClient:
    """`on_failed` is called on the loop, once, when the engine thread has ended with an exception."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failed: Callable[[str], None]) -> None:
        self._loop = loop
        self._on_failed = on_failed
        self._thread: EngineThread | None = None
        self._streams: dict[str, asyncio.Queue[Any]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._copies: dict[tuple[type, str, int], asyncio.Future[bool]] = {}
        self._failed: str | None = None
        self.num_finished: Counter[str] = Counter()
        """Requests that ended in the engine, by reason; "released" are those whose KV was shipped away."""

    def attach(self, thread: EngineThread) -> None:
        self._thread = thread

    def deliver(self, events: list[messages.Event]) -> None:
        """Called on the engine thread."""
        self._loop.call_soon_threadsafe(self._dispatch, events)

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_id: str, deadline_s: float) -> asyncio.Queue[Any]:
        """The queue that the events of one request arrive on, DeadlinePassed among them. Close it when the
        request is over."""
        assert request_id not in self._streams, f"request id {request_id} is already open"
        queue: asyncio.Queue[Any] = asyncio.Queue()
        if self._failed is not None:
            queue.put_nowait(EngineFailed(self._failed))
        self._streams[request_id] = queue
        self._timers[request_id] = self._loop.call_later(deadline_s, queue.put_nowait, DeadlinePassed(deadline_s))
        return queue

    def close(self, request_id: str) -> None:
        """Ends the request if it still runs. May be called twice."""
        if self._streams.pop(request_id, None) is not None:
            self._timers.pop(request_id).cancel()
            self.submit(messages.Abort(request_id))

    def submit(self, command: Command) -> None:
        assert self._thread is not None, "the engine has not started"
        self._thread.submit(command)

    async def read_kv(self, request_id: str, start: int, num_tokens: int, buffer: Buffer) -> bool:
        """Gather into `buffer`. False: the request has ended. Returns only when the engine is done with it."""
        return await self._copy(KvRead, messages.ReadKv(request_id, start, num_tokens, buffer))

    async def write_kv(self, request_id: str, start: int, num_tokens: int, buffer: Buffer) -> bool:
        """Scatter `buffer`. False: the request has ended. Returns only when the engine is done with it."""
        return await self._copy(KvWritten, messages.WriteKv(request_id, start, num_tokens, buffer))

    async def _copy(self, done: type, command: messages.ReadKv | messages.WriteKv) -> bool:
        key = (done, command.request_id, command.start)
        if self._failed is not None or key in self._copies:
            return False
        future: asyncio.Future[bool] = self._loop.create_future()
        self._copies[key] = future
        self.submit(command)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            # The engine may be copying right now: a cancelled caller must not reuse the buffer under it.
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return future.result()

    def _dispatch(self, events: list[messages.Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.num_finished[event.reason] += 1
            elif isinstance(event, Released):
                self.num_finished["released"] += 1
            if isinstance(event, KvRead | KvWritten):
                future = self._copies.pop((type(event), event.request_id, event.start), None)
                if future is not None and not future.done():
                    future.set_result(event.ok)
            elif isinstance(event, EngineFailed):
                self._fail(event)
            elif (queue := self._streams.get(event.request_id)) is not None:
                queue.put_nowait(event)

    def stopped(self) -> None:
        """The thread takes no more commands: what waits for a copy waits in vain, and must not keep the process."""
        for future in self._copies.values():
            if not future.done():
                future.set_result(False)
        self._copies.clear()

    def _fail(self, event: EngineFailed) -> None:
        self._failed = event.message
        self.stopped()
        for queue in self._streams.values():
            queue.put_nowait(event)
        self._on_failed(event.message)
