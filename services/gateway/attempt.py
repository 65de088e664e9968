"""One attempt at one job: its one or two worker streams, from placing to closing.

    pair    decode reserves -> prefill computes and ships, first token -> decode goes on
    local   decode computes the prompt itself
    single  prefill makes the one token that is wanted, nothing is shipped
    moved   decode reserves -> the decode worker that had the job ships what it computed -> decode goes on

On the event loop. Whoever opened an attempt closes it; closing ends the work on both workers at once.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal

from services import auth
from services.gateway.cluster import ClusterView
from services.gateway.inbox import Arrival, Inbox, Side, StreamEnded
from services.gateway.job import Job
from services.gateway.router import Route, WorkerView
from services.gateway.timeline import AttemptRecord
from services.gateway.worker_client import WorkerClient
from services.protocol import (
    Accepted,
    Busy,
    Failure,
    Frame,
    GenerateRequest,
    Handoff,
    PrefillRequest,
    Reservation,
    Reserved,
    ShipRequest,
    Work,
)


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    secret: str
    lease_s: float
    local_prefill_max_tokens: int
    migrate: Literal["ship", "recompute", "wait"] = "ship"


class AttemptFailed(Exception):
    """This attempt is over. `worker` is the one it is put down to; `lost`: it did not say so itself."""

    def __init__(self, worker: WorkerView, failure: Failure, *, lost: bool) -> None:
        super().__init__(failure.message)
        self.worker = worker
        self.failure = failure
        self.lost = lost


class Attempt:
    def __init__(
        self,
        job: Job,
        route: Route,
        client: WorkerClient,
        cluster: ClusterView,
        settings: AttemptSettings,
        source: Attempt | None = None,
    ) -> None:
        """`source`: an attempt that holds the job still, and ships it: `route.prefill` is its decode worker. It is
        closed with this one, and before that stays the caller's where `open` does not succeed."""
        job.num_tries += 1
        self.work_id = f"{job.request_id}-{job.num_tries}"
        self._source = source
        self.job = job
        self.route = route
        self.record = AttemptRecord(
            number=job.num_failures + 1,
            decode=route.decode.url if route.decode else None,
            prefill=route.prefill.url if route.prefill else None,
            started_at=_now() - job.timeline.began,
            why_local=route.why_local,
        )
        self._client = client
        self._cluster = cluster
        self._settings = settings
        self._inbox = Inbox()
        self._unassign: list[Callable[[], None]] = []

    async def open(self) -> Busy | None:
        """Place the job. After Busy and AttemptFailed only close is left."""
        decode, prefill = self.route.decode, self.route.prefill
        if decode is None:
            assert prefill is not None, "a route has a worker"
            self._call_prefill(prefill, None, None)
            self.record.path = self.path
            return None
        handoff = self._mint(prefill, decode) if prefill else None
        request = GenerateRequest(
            work=self._work(),
            handoff=handoff,
            # What is shipped is not computed: the commit carries the token that comes after it.
            local_prefill_max_tokens=0 if self._source else self._settings.local_prefill_max_tokens,
        )
        called = _now()
        self.job.decoded_by = decode.info.incarnation
        self._add("decode", decode, self._client.generate(decode.url, request))
        _, first = await self._inbox.take_one()
        self.record.path = self.path
        self.record.reserve_s = _now() - called
        match first:
            case Busy():
                return first
            case Accepted():
                self._computed_by_decode()
            case Reserved() if prefill is not None:
                self.record.num_reserved_cached = first.reservation.num_cached_tokens
                assert handoff is not None, "a reservation answers a handoff"
                self._have_shipped(prefill, handoff, first.reservation)
            case Failure():
                raise self.failed("decode", first)
            case StreamEnded():
                raise self.lost("decode", first.message)
            case _:
                raise self.lost("decode", f"its answer began with {type(first).__name__}")
        return None

    def keep_source(self) -> None:
        """It does not end with this attempt: it goes on by itself after all."""
        self._source = None

    async def arrivals(self) -> list[Arrival]:
        """What the workers have sent since the last call, at least one."""
        return await self._inbox.take()

    def put_back(self, side: Side, arrival: Frame | StreamEnded) -> None:
        """To be among the arrivals once more."""
        self._inbox.put(side, arrival)

    async def close(self) -> None:
        """Idempotent. What has to happen does so before the first wait: a cancel may come in it."""
        attempts = [self, *([self._source] if self._source is not None else [])]
        for attempt in attempts:
            attempt._inbox.end()
            while attempt._unassign:
                attempt._unassign.pop()()
        for attempt in attempts:
            await attempt._inbox.close()

    def failed(self, side: Side, failure: Failure) -> AttemptFailed:
        """A failure that a worker reported. What it says of a transfer is put down to the sender: a job goes
        on from another one, or without."""
        return AttemptFailed(self._worker("prefill" if failure.kind == "transfer" else side), failure, lost=False)

    def lost(self, side: Side, reason: str) -> AttemptFailed:
        return AttemptFailed(self._worker(side), Failure(message=reason, kind="unavailable"), lost=True)

    @property
    def path(self) -> str:
        """pair, local, single or moved."""
        if self._source is not None:
            return "moved"
        if self.route.decode is None:
            return "single"
        return "pair" if self.record.prefill else "local"

    def _worker(self, side: Side) -> WorkerView:
        prefill, decode = self.route.prefill, self.route.decode
        worker = (prefill or decode) if side == "prefill" else (decode or prefill)
        assert worker is not None, "a route has a worker"
        return worker

    def _computed_by_decode(self) -> None:
        if self.route.prefill is not None:
            self.record.prefill = None
            self.record.path = self.path
            self.record.why_local = "the uncached part of the prompt is short"

    def _have_shipped(self, sender: WorkerView, handoff: Handoff, reservation: Reservation) -> None:
        if self._source is None:
            self._call_prefill(sender, handoff, reservation)
            return
        request = ShipRequest(
            request_id=self._source.work_id,
            deadline_s=max(0.0, self.job.deadline - _now()),
            handoff=handoff,
            reservation=reservation,
        )
        self._add("prefill", sender, self._client.ship(sender.url, request))

    def _call_prefill(self, prefill: WorkerView, handoff: Handoff | None, reservation: Reservation | None) -> None:
        request = PrefillRequest(work=self._work(), handoff=handoff, reservation=reservation)
        self._add("prefill", prefill, self._client.prefill(prefill.url, request))

    def _add(self, side: Side, worker: WorkerView, frames: AsyncGenerator[Frame, None]) -> None:
        self._inbox.add(side, frames)
        lost = self._cluster.assign(worker, lambda reason: self._inbox.put(side, StreamEnded(reason)))
        self._unassign.append(lost)

    def _work(self) -> Work:
        job = self.job
        return Work(
            request_id=self.work_id,
            prompt_token_ids=job.prompt_token_ids,
            sampling=job.sampling,
            deadline_s=max(0.0, job.deadline - _now()),
            output_token_ids=job.output_token_ids[:-1] if self._source else list(job.output_token_ids),
            cache_domain=job.cache_domain,
        )

    def _mint(self, prefill: WorkerView, decode: WorkerView) -> Handoff:
        handoff_id = secrets.token_bytes(auth.HANDOFF_ID_BYTES)
        incarnations = (prefill.info.incarnation, decode.info.incarnation)
        left_s = max(0.0, self.job.deadline - _now())
        expires_at = int(time.time() + left_s + auth.CLOCK_SKEW_S)
        key = auth.handoff_key(self._settings.secret, handoff_id, self.record.number, *incarnations, expires_at)
        return Handoff(
            handoff_id=handoff_id,
            attempt=self.record.number,
            prefill_incarnation=prefill.info.incarnation,
            decode_incarnation=decode.info.incarnation,
            lease_s=self._settings.lease_s,
            expires_at=expires_at,
            key=key,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
