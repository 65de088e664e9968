"""Moves a running stream off a decode worker that is being stopped: its KV goes over the fabric, nothing is computed
twice.

    Leaving --hold--> no more tokens --those on their way arrived--> reserved elsewhere --> a new attempt, to which
    the old one ships
                      no worker has room, or one failed: resumed, and tried again a little later

A stream that cannot be moved runs on; when its worker has gone, it is continued by computing its tokens again, as
after any loss. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from services.gateway.attempt import Attempt, AttemptFailed, AttemptSettings
from services.gateway.cluster import ClusterView
from services.gateway.inbox import StreamEnded
from services.gateway.router import Route, WorkerView, choose_successor
from services.gateway.worker_client import WorkerClient, WorkerLost
from services.protocol import Frame, Held, HoldRequest

logger = logging.getLogger(__name__)
RETRY_S = 0.5
HOLD_TIMEOUT_S = 6.0
"""Longer than a worker itself waits for its engine."""


class Migration:
    """Of one attempt whose worker leaves."""

    def __init__(
        self,
        attempt: Attempt,
        client: WorkerClient,
        cluster: ClusterView,
        settings: AttemptSettings,
        count: Callable[[str], None],
    ) -> None:
        """`count` is told how each try ended: moved, resumed, or not held."""
        assert attempt.route.decode is not None, "only a decode worker says that it leaves"
        self._attempt = attempt
        self._worker: WorkerView = attempt.route.decode
        self._client = client
        self._cluster = cluster
        self._settings = settings
        self._count = count
        self._held_at: int | None = None
        self._retry_at = 0.0

    async def advance(self) -> Attempt | None:
        """To be called after each arrival; does what can be done now. The attempt that takes over, or None."""
        job = self._attempt.job
        if self._held_at is None and _now() >= self._retry_at:
            self._retry_at = _now() + RETRY_S
            if self._successor(set()) is not None:
                self._held_at = await self._hold()
                if self._held_at is None:
                    self._count("not held")
        if self._held_at is None or len(job.output_token_ids) < self._held_at:
            return None
        successor = await self._take_over()
        self._count("moved" if successor is not None else "resumed")
        if successor is None:
            self._held_at = None
            self._retry_at = _now() + RETRY_S
            await self._go_on()
        return successor

    def _successor(self, busy: set[str]) -> WorkerView | None:
        return choose_successor(self._cluster.workers(), self._attempt.job.needs(), self._worker, busy=busy)

    async def _hold(self) -> int | None:
        """Output tokens that the stream will have had when it stands still."""
        answer = await self._ask(HoldRequest(request_id=self._attempt.work_id))
        if isinstance(answer, Held):
            return answer.num_output_tokens
        if answer is None:  # it may have been held all the same
            await self._go_on()
        return None

    async def _resume(self) -> bool:
        for _ in range(2):
            if isinstance(await self._ask(HoldRequest(request_id=self._attempt.work_id, resume=True)), Held):
                return True
        return False

    async def _go_on(self) -> None:
        """The stream stands still: it is resumed, or given up, for nothing more will come of it."""
        if not await self._resume():
            self._attempt.put_back("decode", StreamEnded("it was held, and could not be resumed"))

    async def _ask(self, request: HoldRequest) -> Frame | None:
        """None: no answer."""
        try:
            async with asyncio.timeout(HOLD_TIMEOUT_S):
                return await self._client.hold(self._worker.url, request)
        except (WorkerLost, TimeoutError) as error:
            logger.info("%s: %s", self._worker.url, error or "no answer to a hold")
            return None

    async def _take_over(self) -> Attempt | None:
        busy: set[str] = set()
        while (worker := self._successor(busy)) is not None:
            route = Route(worker, self._worker, why_local="")
            attempt = Attempt(
                self._attempt.job, route, self._client, self._cluster, self._settings, source=self._attempt
            )
            try:
                refused = await attempt.open() is not None
            except AttemptFailed as failed:
                logger.info("%s does not take a stream over: %s", worker.url, failed)
                refused = True
            except BaseException:
                await attempt.close()
                raise
            if not refused:
                return attempt
            attempt.keep_source()
            await attempt.close()
            busy.add(worker.info.incarnation)
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
