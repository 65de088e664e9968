"""Runs schedules one after the other and counts how every request ended."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.soak.schedule import Event, Schedule, make_schedule
from tests.support.cluster import Cluster, WorkerProcess, leftovers, running
from tests.support.load import Answer, ask, body, undisturbed

ROLES = ["prefill", "prefill", "decode", "decode"]
NUM_TEXTS = 24
NUM_OUTPUT = 40
HANG_S = 60.0
"""The gateway gives every request 40 s: one that has not ended by then hangs."""
SETTLE_S = 20.0
WORKER_FLAGS = [
    *("--num-blocks", "70", "--max-batch-tokens", "64", "--max-num-seqs", "8", "--test-faults", ""),
    *("--max-segment-bytes", "32768", "--fabric-silence-s", "2", "--drain-s", "20", "--leave-after-s", "0"),
]
GATEWAY_FLAGS = [
    *("--local-prefill-max-tokens", "0", "--poll-s", "0.3", "--poll-timeout-s", "1", "--lost-after-s", "1.5"),
    *("--recovery-wait-s", "20", "--max-attempts", "5", "--request-timeout-s", "40", "--lease-s", "3"),
]


@dataclass
class Totals:
    seed: int
    num_schedules: int = 0
    requests: int = 0
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    left_early: int = 0
    wrong: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    """Workers that ended by themselves."""
    injected: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.hangs or self.leaks or self.died)

    def shown(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "schedules": self.num_schedules,
            "seconds": round(self.seconds),
            "requests": self.requests,
            "right_answers": self.right,
            "ended_with_an_error": dict(self.errors),
            "client_left_early": self.left_early,
            "faults_injected": dict(sorted(self.injected.items())),
            "workers_stopped_killed_drained": dict(self.events),
            "attempts_by_path": dict(self.attempts),
            "wrong_tokens": self.wrong,
            "leaks": self.leaks,
            "hangs": self.hangs,
            "workers_that_died": self.died,
        }


def soak(model: Path, seed: int, numbers: Iterable[int], progress: Callable[[str], None] = lambda _: None) -> Totals:
    totals, began = Totals(seed), time.monotonic()
    flags = dict.fromkeys(("prefill", "decode"), WORKER_FLAGS)
    with running(model, ROLES, worker_flags=flags, gateway_flags=GATEWAY_FLAGS, fixed_fabric_ports=True) as cluster:
        expected = undisturbed(cluster, range(NUM_TEXTS), NUM_OUTPUT)
        with ThreadPoolExecutor(8) as pool:
            for number in numbers:
                schedule = make_schedule(seed, number, ROLES, NUM_TEXTS)
                _Run(cluster, schedule, expected, totals, pool).do()
                if totals.num_schedules % 25 == 0 or not totals.clean:
                    progress(f"{totals.num_schedules} schedules, {totals.requests} requests, clean: {totals.clean}")
                if not totals.clean:
                    progress(f"schedule {number}: {schedule}")
                    break
    totals.seconds = time.monotonic() - began
    return totals


class _Run:
    """One schedule."""

    def __init__(
        self,
        cluster: Cluster,
        schedule: Schedule,
        expected: dict[int, str],
        totals: Totals,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._cluster = cluster
        self._schedule = schedule
        self._expected = expected
        self._totals = totals
        self._pool = pool
        self._events = threading.Semaphore(0)

    def do(self) -> None:
        totals, schedule = self._totals, self._schedule
        for worker, faults in zip(self._cluster.workers, schedule.faults, strict=True):
            worker.put("/debug/faults", faults).raise_for_status()
        began = time.time()
        asked = zip(schedule.requests, schedule.leave_after, strict=True)
        futures = [(number, self._pool.submit(self._ask, number, leave)) for number, leave in asked]
        if schedule.event is not None:
            self._befall(schedule.event)
        for number, future in futures:
            totals.requests += 1
            try:
                self._count(number, future.result(timeout=HANG_S))
            except (TimeoutError, httpx.TimeoutException) as error:
                totals.hangs.append(f"schedule {schedule.number}: request {number}: {error!r}")
            except AssertionError as error:
                totals.wrong.append(f"schedule {schedule.number}: request {number}: {error}")
        self._restore()
        self._settle(began)
        totals.num_schedules += 1

    def _ask(self, number: int, leave_after: int | None) -> Answer:
        return ask(self._cluster, body(number, NUM_OUTPUT), leave_after, on_event=self._events.release)

    def _count(self, number: int, answer: Answer) -> None:
        expected = self._expected[number]
        if answer.hung_up or answer.error is not None:
            right = expected.startswith(answer.text)
            self._totals.left_early += answer.hung_up
            if answer.error is not None:
                self._totals.errors[answer.error[:90]] += 1
        else:
            right = answer.text == expected
            self._totals.right += right
        if not right:
            where = f"schedule {self._schedule.number}: request {number}"
            self._totals.wrong.append(f"{where}: {answer.text!r} is not {expected!r}")

    def _befall(self, event: Event) -> None:
        for _ in range(event.after_events):
            self._events.acquire(timeout=1.0)
        worker = self._cluster.workers[event.worker]
        self._totals.events[event.what] += 1
        if event.what == "stop":
            worker.send(signal.SIGSTOP)
            time.sleep(event.seconds)
            worker.send(signal.SIGCONT)
        else:
            worker.send(signal.SIGKILL if event.what == "kill" else signal.SIGTERM)

    def _restore(self) -> None:
        """Faults off; a worker that was ended is started again on its ports."""
        for worker in self._cluster.workers:
            if not self._has_ended(worker):
                self._totals.injected.update(worker.put("/debug/faults", "").json())
                continue
            status = worker.wait(40)
            event = self._schedule.event
            if event is None or self._cluster.workers[event.worker] is not worker:
                self._totals.died.append(f"schedule {self._schedule.number}: {worker.role} ended with {status}")
            elif event.what == "drain" and status != 0:
                self._totals.died.append(f"schedule {self._schedule.number}: a drained {worker.role} gave {status}")
            worker.start()
            worker.wait_ready()
        self._cluster.wait_usable()

    def _has_ended(self, worker: WorkerProcess) -> bool:
        event = self._schedule.event
        told = event is not None and event.what in ("kill", "drain") and self._cluster.workers[event.worker] is worker
        return told or worker.popen is None or worker.popen.poll() is not None

    def _settle(self, began: float) -> None:
        """Nothing of any request is left on any worker."""
        deadline = time.monotonic() + SETTLE_S
        for worker in self._cluster.workers:
            while left := leftovers(worker.ledger()):
                if time.monotonic() > deadline:
                    self._totals.leaks.append(f"schedule {self._schedule.number}: {worker.role}: {left}")
                    return
                time.sleep(0.02)
        for record in self._cluster.records():
            if record["arrived"] >= began:
                self._totals.attempts.update(attempt["path"] for attempt in record["attempts"])
