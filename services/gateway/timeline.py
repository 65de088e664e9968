"""Where one request's time went, and the last requests of the process for the admin API.

On the event loop. Times are seconds; those with `_at` count from the request's arrival.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from services.protocol import Stats


@dataclass(slots=True)
class AttemptRecord:
    number: int
    decode: str | None
    prefill: str | None
    started_at: float
    path: str = ""
    """pair, local, single or moved."""
    why_local: str = ""
    reserve_s: float | None = None
    """From the call to the decode worker's answer."""
    num_reserved_cached: int | None = None
    """Tokens decode already had of a prompt that was handed off."""
    prefill_stats: Stats | None = None
    decode_stats: Stats | None = None
    outcome: str = "running"


@dataclass(slots=True)
class Timeline:
    request_id: str
    endpoint: str
    arrived: float
    """Wall clock, for people."""
    began: float
    """Arrival on the event loop's clock."""
    client_request_id: str | None = None
    tenant: str | None = None
    outcome: str = "running"
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    tokenize_s: float = 0.0
    """Body to token ids, the wait for a thread included."""
    queue_s: float = 0.0
    """Waiting in the gateway for a worker with room."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    total_s: float | None = None
    attempts: list[AttemptRecord] = field(default_factory=list)
    choices: list[Timeline] = field(default_factory=list)
    """One each, where there are several. What happened to all of them is told here too."""

    def of_choice(self, index: int, num_prompt_tokens: int) -> Timeline:
        """A new choice's own."""
        choice = Timeline(f"{self.request_id}-{index}", self.endpoint, self.arrived, self.began)
        choice.num_prompt_tokens = num_prompt_tokens
        self.choices.append(choice)
        return choice

    def cached_tokens(self, num_per_prompt: int) -> int | None:
        """Of each prompt once: what the choice that computed it found."""
        if not self.choices:
            return self.num_cached_tokens
        found = [choice.num_cached_tokens for choice in self.choices[::num_per_prompt]]
        self.num_cached_tokens = None if None in found else sum(number or 0 for number in found)
        return self.num_cached_tokens

    def finish(self, now: float) -> None:
        """`now` on the clock of `began`."""
        self.total_s = now - self.began
        if not self.choices:
            return
        self.num_output_tokens = sum(choice.num_output_tokens for choice in self.choices)
        self.queue_s = max(choice.queue_s for choice in self.choices)
        self.attempts = [attempt for choice in self.choices for attempt in choice.attempts]
        first = [choice.first_token_at for choice in self.choices if choice.first_token_at is not None]
        last = [choice.last_token_at for choice in self.choices if choice.last_token_at is not None]
        self.first_token_at, self.last_token_at = min(first, default=None), max(last, default=None)
        reasons = {choice.finish_reason for choice in self.choices}
        self.finish_reason = reasons.pop() if len(reasons) == 1 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens after the first, over the time from the first to the last."""
        if self.first_token_at is None or self.last_token_at is None or self.num_output_tokens < 2:
            return None
        seconds = self.last_token_at - self.first_token_at
        return (self.num_output_tokens - 1) / seconds if seconds > 0 else None

    def body(self) -> dict[str, Any]:
        last = self.attempts[-1] if self.attempts else None
        return {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "tenant": self.tenant,
            "endpoint": self.endpoint,
            "arrived": self.arrived,
            "outcome": self.outcome,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "gateway": {
                "tokenize_s": self.tokenize_s,
                "queue_s": self.queue_s,
                "reserve_s": last.reserve_s if last else None,
            },
            "prefill": _prefill_body(last),
            "transfer": _transfer_body(last),
            "decode": _decode_body(last) | {"tokens_per_s": self.decode_tokens_per_s},
            "first_token_at": self.first_token_at,
            "last_token_at": self.last_token_at,
            "total_s": self.total_s,
            "attempts": [_attempt_body(attempt) for attempt in self.attempts],
            "choices": [choice.body() for choice in self.choices],
        }


def _prefill_body(attempt: AttemptRecord | None) -> dict[str, Any]:
    """Of the worker that computed the prompt, prefill or decode."""
    if attempt is None:
        return {}
    stats = attempt.prefill_stats if attempt.prefill else attempt.decode_stats
    where = {"worker": attempt.prefill or attempt.decode, "why_local": attempt.why_local or None}
    if stats is None:
        return where
    return where | {
        "queue_s": stats.queue_s,
        "compute_s": stats.prefill_s,
        "num_cached_tokens": stats.num_cached_tokens,
    }


def _transfer_body(attempt: AttemptRecord | None) -> dict[str, Any] | None:
    stats = attempt.prefill_stats if attempt else None
    if stats is None or not stats.lane:
        return None
    return {
        "bytes": stats.transfer_bytes,
        "seconds": stats.transfer_s,
        "wait_s": stats.transfer_wait_s,
        "lane": stats.lane,
    }


def _decode_body(attempt: AttemptRecord | None) -> dict[str, Any]:
    stats = attempt.decode_stats if attempt else None
    where: dict[str, Any] = {"worker": attempt.decode if attempt else None}
    if stats is None:
        return where
    return where | {
        "first_step_s": stats.first_step_s,
        "decode_s": stats.decode_s,
        "num_preemptions": stats.num_preemptions,
    }


def _attempt_body(attempt: AttemptRecord) -> dict[str, Any]:
    return {
        "number": attempt.number,
        "started_at": attempt.started_at,
        "decode": attempt.decode,
        "prefill": attempt.prefill,
        "path": attempt.path,
        "reserve_s": attempt.reserve_s,
        "num_reserved_cached": attempt.num_reserved_cached,
        "outcome": attempt.outcome,
    }


class Timelines:
    """Running requests, and the last `max_finished` that ended."""

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._running: dict[str, Timeline] = {}
        self._finished: OrderedDict[str, Timeline] = OrderedDict()

    def begin(self, timeline: Timeline) -> None:
        self._running[timeline.request_id] = timeline

    def end(self, timeline: Timeline) -> None:
        self._running.pop(timeline.request_id, None)
        self._finished[timeline.request_id] = timeline
        while len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    def find(self, request_id: str) -> Timeline | None:
        return self._running.get(request_id) or self._finished.get(request_id)

    def latest(self, count: int) -> list[Timeline]:
        """Running ones first, then finished ones from the newest back."""
        return [*self._running.values(), *reversed(self._finished.values())][:count]
