"""The life of one job: placed, run, and if a worker fails it, tried again from where the client stands.

    waiting --room--> placed --tokens*--> finished
       ^                 |--busy--> waiting         prefill had no room after all; not counted as an attempt
       '-----------------'--failed--> waiting       the next attempt is given the tokens made so far
                                 '--> ApiError      invalid, deadline, or no attempt left
                         |--leaving--> placed       its decode worker is being stopped: moved, KV and all

A prefill worker that failed a job is not given it again: another one is, then decode computes the prompt
itself. Tokens already made travel as output_token_ids, and sampling depends on position only, so the seam
does not show.

On the event loop, one generator a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.gateway.admission import Admission
from services.gateway.attempt import Attempt, AttemptFailed, AttemptSettings
from services.gateway.cluster import ClusterView
from services.gateway.errors import ApiError, DeadlinePassed, Failed, InvalidRequest, Unavailable
from services.gateway.inbox import Arrival, Side, StreamEnded
from services.gateway.job import Job, NewTokens, OutOfOrder
from services.gateway.metrics import GatewayMetrics
from services.gateway.migration import Migration
from services.gateway.router import NoRoute, choose, choose_successor
from services.gateway.worker_client import WorkerClient
from services.protocol import (
    Accepted,
    Busy,
    Failure,
    Finish,
    Held,
    Leaving,
    PromptLogprobs,
    Reserved,
    Stats,
    Tokens,
    Transferred,
)

logger = logging.getLogger(__name__)
LAST_WORD_S = 0.5
_OURS = frozenset({"request_id", "handoff", "reservation"})
"""Fields that the gateway makes up: when a worker calls one invalid, that is no fault of the client's."""


@dataclass(slots=True)
class _Run:
    """One placed attempt while its frames are read."""

    attempt: Attempt
    prefill_done: bool = False
    prefill_busy: bool = False
    failure: AttemptFailed | None = None
    migration: Migration | None = None
    recompute: bool = False
    """Its decode worker leaves, and another is to compute the tokens so far again."""

    @property
    def over(self) -> bool:
        if self.prefill_busy or self.recompute or self.failure is not None:
            return True
        return self.attempt.job.finish_reason is not None


class Handoffs:
    def __init__(
        self,
        client: WorkerClient,
        cluster: ClusterView,
        admission: Admission,
        metrics: GatewayMetrics,
        settings: AttemptSettings,
        *,
        max_attempts: int,
        recovery_wait_s: float,
    ) -> None:
        self._client = client
        self._cluster = cluster
        self._admission = admission
        self._metrics = metrics
        self._settings = settings
        self._max_attempts = max_attempts
        self._recovery_wait_s = recovery_wait_s

    async def run(self, job: Job) -> AsyncGenerator[NewTokens, None]:
        """New output tokens as they come, each once and in order; sets `job.finish_reason` at the end.

        Raises ApiError. Closing the generator ends the work on the workers.
        """
        busy_prefill: str | None = None
        while job.finish_reason is None:
            try:
                run = _Run(await self._place(job, busy_prefill))
                busy_prefill = None
                try:
                    while not run.over:
                        tokens = self._absorb(run, await run.attempt.arrivals())
                        if tokens:
                            yield tokens
                        if run.migration is not None and not run.over:
                            run = await self._migrate(run, run.migration)
                    await self._hear_out_prefill(run)
                finally:
                    run.attempt.record.outcome = _outcome(run)
                    await self._close(run.attempt)
                if run.failure is not None:
                    raise run.failure
                if run.prefill_busy and run.attempt.route.prefill is not None:
                    busy_prefill = run.attempt.route.prefill.info.incarnation
            except AttemptFailed as failed:
                self._after_failure(job, failed)

    async def _place(self, job: Job, busy_prefill: str | None) -> Attempt:
        """Wait for a worker with room and take it. Raises AttemptFailed, Overloaded, Unavailable."""
        began = _now()
        busy = {busy_prefill} if busy_prefill else set()
        was_refused = False
        with self._admission.turn(job.ticket) as turn:
            while True:
                await turn.wait(was_refused=was_refused)
                attempt = await self._place_now(job, busy)
                if attempt is not None:
                    waited = _now() - began - (attempt.record.reserve_s or 0.0)
                    job.timeline.queue_s += waited
                    self._metrics.queue.observe(waited)
                    return attempt
                was_refused, busy = True, set()

    async def _place_now(self, job: Job, busy: set[str]) -> Attempt | None:
        """Ask workers until one has room; None when all are busy. `busy`: incarnations not worth asking."""
        while True:
            route = choose(self._cluster.workers(), job.needs(), avoid=job.avoid, busy=busy)
            if isinstance(route, NoRoute):
                if route.all_busy:
                    return None
                await self._wait_for_workers(job, route.reason)
                continue
            attempt = Attempt(job, route, self._client, self._cluster, self._settings)
            try:
                refusal = await attempt.open()
            except BaseException as error:
                attempt.record.outcome = str(error) or type(error).__name__
                job.timeline.attempts.append(attempt.record)
                await self._close(attempt)
                raise
            if refusal is None:
                job.timeline.attempts.append(attempt.record)
                self._metrics.attempts.labels(attempt.path).inc()
                return attempt
            await attempt.close()
            assert route.decode is not None, "only a decode worker refuses at once"
            self._metrics.busy.labels("decode").inc()
            busy.add(route.decode.info.incarnation)

    async def _wait_for_workers(self, job: Job, reason: str) -> None:
        """Nothing is there to be asked. A request that a worker has already been lost for waits a while."""
        if not job.num_failures:
            raise Unavailable(reason)
        try:
            async with asyncio.timeout(self._recovery_wait_s):
                await self._cluster.changed()
        except TimeoutError:
            raise Unavailable(reason) from None

    async def _migrate(self, run: _Run, migration: Migration) -> _Run:
        successor = await migration.advance()
        if successor is None:
            return run
        run.attempt.record.outcome = "moved"
        run.attempt.job.timeline.attempts.append(successor.record)
        self._metrics.attempts.labels(successor.path).inc()
        return _Run(successor)

    def _absorb(self, run: _Run, arrivals: list[Arrival]) -> NewTokens:
        """Take in frames up to the one that ends the attempt; returns the tokens that came before it."""
        job = run.attempt.job
        tokens: NewTokens = []
        for side, arrival in arrivals:
            match arrival:
                case Tokens():
                    try:
                        tokens += job.take(arrival)
                    except OutOfOrder as error:
                        run.failure = run.attempt.lost(side, str(error))
                case PromptLogprobs():
                    try:
                        job.take_prompt_logprobs(arrival)
                    except OutOfOrder as error:
                        run.failure = run.attempt.lost(side, str(error))
                case Finish():
                    self._note_stats(run.attempt, side, arrival.stats)
                    job.finish_reason = arrival.reason
                case Transferred():
                    self._note_stats(run.attempt, side, arrival.stats)
                    run.prefill_done = True
                case Leaving() if self._settings.migrate == "ship" and side == "decode":
                    if run.migration is None:
                        run.migration = Migration(
                            run.attempt, self._client, self._cluster, self._settings, self._count_migration
                        )
                case Leaving():
                    run.recompute = self._settings.migrate == "recompute" and self._has_successor(run.attempt)
                case Busy():
                    self._metrics.busy.labels(side).inc()
                    run.prefill_busy = True
                case Failure():
                    run.failure = run.attempt.failed(side, arrival)
                case StreamEnded() if side == "decode" or not run.prefill_done:
                    run.failure = run.attempt.lost(side, arrival.message)
                case Reserved() | Accepted() | Held():
                    run.failure = run.attempt.lost(side, f"{type(arrival).__name__} came twice")
            if run.over:
                break
        return tokens

    def _count_migration(self, outcome: str) -> None:
        self._metrics.migrations.labels(outcome).inc()

    def _has_successor(self, attempt: Attempt) -> bool:
        worker = attempt.route.decode
        return worker is not None and choose_successor(self._cluster.workers(), attempt.job.needs(), worker) is not None

    def _note_stats(self, attempt: Attempt, side: Side, stats: Stats) -> None:
        record, timeline = attempt.record, attempt.job.timeline
        if side == "prefill":
            record.prefill_stats = stats
            self._metrics.transfer_bytes.inc(stats.transfer_bytes)
        else:
            record.decode_stats = stats
        computed_prompt = (side == "prefill") == (record.prefill is not None)
        if computed_prompt and attempt.path != "moved" and timeline.num_cached_tokens is None:
            timeline.num_cached_tokens = min(stats.num_cached_tokens, timeline.num_prompt_tokens)

    async def _hear_out_prefill(self, run: _Run) -> None:
        """Decode has finished, so prefill's last word, with its figures, is on its way. It is not worth a failure."""
        if run.attempt.path != "pair" or run.prefill_done or run.attempt.record.decode_stats is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                while not run.prefill_done:
                    for side, arrival in await run.attempt.arrivals():
                        if isinstance(arrival, PromptLogprobs):
                            run.attempt.job.take_prompt_logprobs(arrival)
                            continue
                        if side == "prefill" and isinstance(arrival, Transferred):
                            self._note_stats(run.attempt, side, arrival.stats)
                        run.prefill_done |= side == "prefill"

    def _after_failure(self, job: Job, failed: AttemptFailed) -> None:
        """Returns if the job is to be tried again or has in fact ended; raises the ApiError otherwise."""
        failure, worker = failed.failure, failed.worker
        logger.warning("request %s: %s worker %s: %s", job.request_id, worker.info.role, worker.url, failure.message)
        if failed.lost or failure.kind == "unavailable":
            self._cluster.report_failure(worker.info.incarnation, failure.message)
        if failure.kind == "invalid" and failure.param not in _OURS:
            raise InvalidRequest(failure.message, param=failure.param)
        if failure.kind == "deadline":
            raise DeadlinePassed(failure.message)
        job.finish_reason = job.known_ending()
        if job.finish_reason is not None:
            return
        job.num_failures += 1
        job.avoid.add(worker.info.incarnation)
        if job.num_failures >= self._max_attempts:
            raise _given_up(job, failure)
        self._metrics.retries.labels(failure.kind).inc()

    async def _close(self, attempt: Attempt) -> None:
        try:
            await attempt.close()
        finally:
            self._admission.capacity_freed()


def _given_up(job: Job, failure: Failure) -> ApiError:
    message = f"the request failed after {job.num_failures} attempts, last: {failure.message}"
    return Unavailable(message) if failure.kind == "unavailable" else Failed(message)


def _outcome(run: _Run) -> str:
    if run.failure is not None:
        return str(run.failure)
    if run.prefill_busy:
        return "prefill was busy"
    if run.recompute:
        return "its worker leaves"
    return run.attempt.job.finish_reason or "closed"


def _now() -> float:
    return asyncio.get_running_loop().time()
