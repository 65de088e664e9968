"""How much one API key may use. Pure: `now` is an argument, in seconds on any steady clock.

Requests and tokens are buckets that fill at their rate and hold a minute's worth. A request takes its prompt's tokens
when it is accepted and its output's when it ends, so the token bucket can go below empty; nothing new is accepted
until it is above it again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PER_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    what: str
    retry_after_s: float


class Bucket:
    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = -math.inf

    def level(self, now: float) -> float:
        if now > self._at:
            filled = self._level + (now - self._at) * self.per_minute / PER_S
            self._level = min(float(self.per_minute), filled)
            self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Below empty, if it must be."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much is there."""
        return max(0.0, (amount - self.level(now)) * PER_S / self.per_minute)


class Meter:
    """What one key has used."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_running = 0
        self._requests = Bucket(limits.requests_per_minute) if limits.requests_per_minute else None
        self._tokens = Bucket(limits.tokens_per_minute) if limits.tokens_per_minute else None

    def begin(self, now: float) -> Refusal | None:
        """Takes one request, or says why not. What was begun must be ended."""
        if self.limits.concurrent is not None and self.num_running >= self.limits.concurrent:
            return Refusal(f"{self.limits.concurrent} requests at a time", 1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)):
            return Refusal(f"{self._requests.per_minute} requests per minute", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)):
            return Refusal(f"{self._tokens.per_minute} tokens per minute", wait_s)
        if self._requests is not None:
            self._requests.take(1, now)
        self.num_running += 1
        return None

    def end(self) -> None:
        self.num_running -= 1

    def take_prompt(self, num_tokens: int, now: float) -> Refusal | None:
        """A prompt longer than a minute's worth is accepted when the bucket is full: it would never be otherwise."""
        if self._tokens is None:
            return None
        wait_s = self._tokens.wait_s(min(num_tokens, self._tokens.per_minute), now)
        if wait_s:
            return Refusal(f"{self._tokens.per_minute} tokens per minute", wait_s)
        self._tokens.take(num_tokens, now)
        return None

    def take_output(self, num_tokens: int, now: float) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """As OpenAI names them."""
        found: dict[str, str] = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.wait_s(bucket.per_minute, now))
        return found


def duration(seconds: float) -> str:
    """As OpenAI writes them: 12ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
