"""What the gateway knows of its workers: asks each one every second, and at once after a failure.

On the event loop. A worker is usable while it answers, is ready and is not suspected; it is lost when it has not
answered for `lost_after_s` or has come back as another incarnation, and whoever waits for it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.gateway.router import WorkerView
from services.gateway.worker_client import WorkerClient, WorkerLost
from services.protocol import WorkerInfo

logger = logging.getLogger(__name__)


class DiscoveryError(Exception):
    """Where workers are to be looked for cannot be reached at all; the text says why."""


class ClusterView(ABC):
    """Where routing learns which workers there are."""

    @abstractmethod
    def workers(self) -> Sequence[WorkerView]:
        """Those that can be given work now."""

    @abstractmethod
    def report_failure(self, incarnation: str, reason: str) -> None:
        """A call to this worker failed: it is used again once it has answered."""

    @abstractmethod
    def assign(self, worker: WorkerView, on_lost: Callable[[str], None]) -> Callable[[], None]:
        """Count a request as being on this worker; `on_lost` is called if it goes. Returns what ends both."""

    @abstractmethod
    async def changed(self) -> None:
        """Returns when a worker has become usable or ceased to be."""

    @abstractmethod
    def describe(self) -> list[dict[str, Any]]:
        """For the admin API: every worker, usable or not."""


class _Worker:
    def __init__(self, url: str, role: str = "", identity: str = "") -> None:
        self.url = url
        self.role = role
        """The one it must have; empty: any."""
        self.identity = identity
        """Of whoever runs at this URL, where discovery knows: another one is another worker."""
        self.barred = ""
        """Why discovery wants it given no work; empty when it may."""
        self.info: WorkerInfo | None = None
        self.problem = "not asked yet"
        """Empty while the worker is usable."""
        self.answered_at = 0.0
        self.num_assigned_then = 0
        self.ask_now = asyncio.Event()
        self.watchers: dict[object, Callable[[str], None]] = {}

    def view(self) -> WorkerView | None:
        if self.problem or self.info is None:
            return None
        return WorkerView(self.url, self.info, len(self.watchers), self.num_assigned_then)


class PolledCluster(ClusterView):
    """Asks each worker it has been told of. Create inside the running loop."""

    def __init__(self, client: WorkerClient, *, poll_s: float, lost_after_s: float) -> None:
        self._workers: dict[str, _Worker] = {}
        self._client = client
        self._poll_s = poll_s
        self._lost_after_s = lost_after_s
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @abstractmethod
    def start(self) -> None:
        """Begin to look for workers and to ask them."""

    async def close(self) -> None:
        tasks = list(self._polls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def urls(self) -> set[str]:
        return set(self._workers)

    def add(self, url: str, *, role: str = "", identity: str = "", barred: str = "") -> None:
        """Ask this worker from now on, or take in what has changed about it."""
        worker = self._workers.get(url)
        if worker is not None and worker.identity != identity:
            self.remove(url, "another worker has its address")
            worker = None
        if worker is None:
            worker = self._workers[url] = _Worker(url, role, identity)
            worker.barred = barred
            self._polls[url] = asyncio.create_task(self._poll(worker))
        elif worker.barred != barred:
            worker.barred = barred
            logger.info("worker %s: %s", url, barred or "is to be used")
            self._set_problem(worker, worker.problem, changed=True)
            worker.ask_now.set()

    def remove(self, url: str, reason: str) -> None:
        """Whoever waits for this worker is told that it is lost."""
        worker = self._workers.pop(url)
        self._polls.pop(url).cancel()
        self._set_problem(worker, reason)
        self._lose(worker, reason)

    def workers(self) -> Sequence[WorkerView]:
        """Of a role none of which is left, those that discovery bars and that still say they are ready: a pod is
        told to go as soon as its successor is there, which may be before the successor has been asked."""
        views = [(worker, view) for worker in self._workers.values() if (view := worker.view()) is not None]
        roles = {view.info.role for worker, view in views if not worker.barred}
        return [view for worker, view in views if not worker.barred or view.info.role not in roles]

    def report_failure(self, incarnation: str, reason: str) -> None:
        for worker in self._of(incarnation):
            self._set_problem(worker, reason)
            worker.ask_now.set()

    def assign(self, worker: WorkerView, on_lost: Callable[[str], None]) -> Callable[[], None]:
        token = object()
        known = self._workers.get(worker.url)
        if known is None:  # it went between the choice and the call
            asyncio.get_running_loop().call_soon(on_lost, "the worker is gone")
            return lambda: None
        watchers = known.watchers
        watchers[token] = on_lost
        return lambda: watchers.pop(token, None) and None

    async def changed(self) -> None:
        await self._changed.wait()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "url": worker.url,
                "usable": worker.view() is not None and not worker.barred,
                "problem": worker.problem or worker.barred or None,
                "num_assigned": len(worker.watchers),
                "info": worker.info,
            }
            for worker in self._workers.values()
        ]

    def _of(self, incarnation: str) -> Iterator[_Worker]:
        return (w for w in self._workers.values() if w.info is not None and w.info.incarnation == incarnation)

    async def _poll(self, worker: _Worker) -> None:
        while True:
            worker.ask_now.clear()
            try:
                self._answered(worker, await self._client.info(worker.url))
            except WorkerLost as error:
                self._silent(worker, str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await worker.ask_now.wait()
                    # A worker that keeps failing calls is not asked more often than this.
                    await asyncio.sleep(self._poll_s / 10)

    def _answered(self, worker: _Worker, info: WorkerInfo) -> None:
        before, worker.info = worker.info, info
        worker.answered_at = asyncio.get_running_loop().time()
        worker.num_assigned_then = len(worker.watchers)
        if before is not None and before.incarnation != info.incarnation:
            self._lose(worker, "the worker was restarted")
        self._set_problem(worker, _problem(worker, info))

    def _silent(self, worker: _Worker, reason: str) -> None:
        self._set_problem(worker, reason)
        if asyncio.get_running_loop().time() - worker.answered_at > self._lost_after_s:
            self._lose(worker, f"the worker has not answered for {self._lost_after_s:.0f} s")

    def _lose(self, worker: _Worker, reason: str) -> None:
        watchers, worker.watchers = dict(worker.watchers), {}
        for on_lost in watchers.values():
            on_lost(reason)

    def _set_problem(self, worker: _Worker, problem: str, *, changed: bool = False) -> None:
        if bool(problem) != bool(worker.problem):
            changed = True
            name = f"{worker.info.role} worker {worker.url}" if worker.info else f"worker {worker.url}"
            logger.info("%s %s", name, f"is not usable: {problem}" if problem else "is usable")
        worker.problem = problem
        if changed:
            self._changed.set()
            self._changed = asyncio.Event()


class StaticCluster(PolledCluster):
    """A fixed list of worker URLs."""

    def __init__(self, urls: Sequence[str], client: WorkerClient, *, poll_s: float, lost_after_s: float) -> None:
        super().__init__(client, poll_s=poll_s, lost_after_s=lost_after_s)
        self._urls = urls

    def start(self) -> None:
        for url in self._urls:
            self.add(url)


def _problem(worker: _Worker, info: WorkerInfo) -> str:
    """Why this worker can be given no work by what it says of itself, or nothing."""
    if worker.role and info.role != worker.role:
        return f"it says that it is a {info.role} worker, its label says {worker.role}"
    return "" if info.state == "ready" else f"{info.state}: {info.message}".rstrip(": ")
