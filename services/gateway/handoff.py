"""The life of one job: placed, run, and if a worker fails it, tried again from where the client stands.

    waiting --room--> placed --tokens*--> finished
       ^                 |--busy--> waiting              a worker had no room after all; not counted as an attempt
       '-----------------'--failed--> waiting            the next attempt is given the tokens made so far
                                 '--> ApiError           invalid, deadline, or no attempt left

A prefill worker that failed a job is not given it again: another one is, then decode computes the prompt itself.
Tokens already made travel as output_token_ids, and sampling depends on position only, so the seam does not show.

On the event loop, one generator a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.gateway.admission import Admission
from services.gateway.attempt import Attempt, AttemptFailed, AttemptSettings, worker_lost
from services.gateway.cluster import ClusterView
from services.gateway.errors import DeadlinePassed, Failed, InvalidRequest, Unavailable
from services.gateway.inbox import Arrival, Side, StreamEnded
from services.gateway.job import Job, OutOfOrder
from services.gateway.metrics import GatewayMetrics
from services.gateway.router import NoRoute, Route, choose
from services.gateway.worker_client import WorkerClient
from services.protocol import Accepted, Busy, Failure, Finish, Reserved, Stats, TokenLogprob, Tokens, Transferred

logger = logging.getLogger(__name__)
LAST_WORD_S = 0.5
NewTokens = list[tuple[int, TokenLogprob | None]]
_OURS = frozenset({"request_id", "handoff", "reservation"})
"""Fields that the gateway makes up: when a worker calls one invalid, that is no fault of the client's."""


@dataclass(slots=True)
class _Progress:
    """What is known about the running attempt."""

    prefill_done: bool = False
    busy: Side | None = None


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
        refused: Side | None = None
        while job.finish_reason is None:
            try:
                attempt = await self._place(job, was_refused=refused is not None)
                progress = _Progress()
                try:
                    while job.finish_reason is None and progress.busy is None:
                        tokens = self._absorb(attempt, progress, await attempt.arrivals())
                        if tokens:
                            yield tokens
                    await self._hear_out_prefill(attempt, progress)
                finally:
                    attempt.record.outcome = _outcome(job, progress)
                    await self._close(attempt)
                refused = progress.busy
            except AttemptFailed as failure:
                refused = None
                self._after_failure(job, failure)

    async def _place(self, job: Job, *, was_refused: bool) -> Attempt:
        """Wait for a worker with room and take it. Raises AttemptFailed, Overloaded, Unavailable."""
        began = _now()
        with self._admission.turn(job.ticket) as turn:
            while True:
                await turn.wait(was_refused=was_refused)
                attempt = await self._place_now(job)
                if attempt is not None:
                    waited = _now() - began - (attempt.record.reserve_s or 0.0)
                    job.timeline.queue_s += waited
                    self._metrics.queue.observe(waited)
                    return attempt
                was_refused = True

    async def _place_now(self, job: Job) -> Attempt | None:
        """Ask workers until one has room; None when all are busy."""
        busy: set[str] = set()
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
                self._blame(job, attempt, error)
                await self._close(attempt)
                raise
            if refusal is None:
                job.timeline.attempts.append(attempt.record)
                self._metrics.attempts.labels(_path(route, attempt)).inc()
                return attempt
            await self._close(attempt, freed=False)
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

    def _absorb(self, attempt: Attempt, progress: _Progress, arrivals: list[Arrival]) -> NewTokens:
        """Take in frames up to the one that ends the attempt. Raises AttemptFailed, but not while there are tokens
        to give on: the failure stays first in line."""
        job = attempt.job
        tokens: NewTokens = []
        for side, arrival in arrivals:
            match arrival:
                case Tokens():
                    try:
                        tokens += job.take(arrival)
                    except OutOfOrder as error:
                        raise self._failed(attempt, worker_lost(side, str(error))) from error
                case Finish():
                    self._note_stats(attempt, side, arrival.stats)
                    job.finish_reason = arrival.reason
                case Transferred():
                    self._note_stats(attempt, side, arrival.stats)
                    progress.prefill_done = True
                case Busy():
                    self._metrics.busy.labels(side).inc()
                    progress.busy = side
                case Failure():
                    self._end_or_fail(attempt, tokens, AttemptFailed(_culprit(side, arrival, progress), arrival))
                case StreamEnded():
                    if not (side == "prefill" and progress.prefill_done):
                        self._end_or_fail(attempt, tokens, worker_lost(side, arrival.message))
                case Reserved() | Accepted():
                    raise self._failed(attempt, worker_lost(side, f"{type(arrival).__name__} came twice"))
            if job.finish_reason is not None or progress.busy is not None:
                break
        return tokens

    def _end_or_fail(self, attempt: Attempt, tokens: NewTokens, failure: AttemptFailed) -> None:
        """A failure that came after the last token changes nothing; one with tokens before it waits its turn."""
        job = attempt.job
        job.finish_reason = job.known_ending()
        if job.finish_reason is not None:
            return
        if tokens:
            attempt.put_back(failure.side, failure.failure)
            return
        raise self._failed(attempt, failure)

    def _failed(self, attempt: Attempt, failure: AttemptFailed) -> AttemptFailed:
        self._blame(attempt.job, attempt, failure)
        return failure

    def _blame(self, job: Job, attempt: Attempt, error: BaseException) -> None:
        if not isinstance(error, AttemptFailed) or error.failure.kind in ("invalid", "deadline"):
            return
        worker = attempt.worker(error.side)
        job.avoid.add(worker.info.incarnation)
        logger.warning(
            "request %s: attempt %d failed on %s %s: %s",
            job.request_id,
            attempt.record.number,
            error.side,
            worker.url,
            error,
        )
        if error.worker_lost:
            self._cluster.report_failure(worker.info.incarnation, str(error))

    def _after_failure(self, job: Job, error: AttemptFailed) -> None:
        """Returns when another attempt may be made. Raises ApiError otherwise."""
        failure = error.failure
        job.num_failures += 1
        if failure.kind == "invalid" and failure.param not in _OURS:
            raise InvalidRequest(failure.message, param=failure.param) from error
        if failure.kind == "deadline":
            raise DeadlinePassed("the request was not finished in its time") from error
        if job.num_failures >= self._max_attempts:
            raise Failed(f"the request failed {job.num_failures} times, the last time: {failure.message}") from error
        self._metrics.retries.labels(failure.kind).inc()

    def _note_stats(self, attempt: Attempt, side: Side, stats: Stats) -> None:
        timeline = attempt.job.timeline
        if side == "prefill":
            attempt.record.prefill_stats = stats
            self._metrics.transfer_bytes.inc(stats.transfer_bytes)
        else:
            attempt.record.decode_stats = stats
        if (side == "prefill") == (attempt.record.prefill is not None) and timeline.num_cached_tokens is None:
            # A retry's hits include what earlier attempts have computed; a prompt has only so many tokens.
            timeline.num_cached_tokens = min(stats.num_cached_tokens, timeline.num_prompt_tokens)

    async def _hear_out_prefill(self, attempt: Attempt, progress: _Progress) -> None:
        """Decode has finished, so prefill's last word, with its figures, is on its way. It is not worth a failure."""
        pair = attempt.record.prefill is not None and attempt.route.decode is not None
        if not pair or progress.prefill_done or attempt.record.decode_stats is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                while not progress.prefill_done:
                    for side, arrival in await attempt.arrivals():
                        if side == "prefill" and isinstance(arrival, Transferred):
                            self._note_stats(attempt, side, arrival.stats)
                        progress.prefill_done |= side == "prefill"

    async def _close(self, attempt: Attempt, *, freed: bool = True) -> None:
        await attempt.close()
        if freed:
            self._admission.capacity_freed()


def _culprit(side: Side, failure: Failure, progress: _Progress) -> Side:
    """Decode reports a transfer that did not come; who did not bring it is prefill."""
    return "prefill" if failure.kind == "transfer" and not progress.prefill_done else side


def _outcome(job: Job, progress: _Progress) -> str:
    return job.finish_reason or ("busy" if progress.busy else "ended early")


def _path(route: Route, attempt: Attempt) -> str:
    if route.decode is None:
        return "single"
    return "pair" if attempt.record.prefill else "local"


def _now() -> float:
    return asyncio.get_running_loop().time()
