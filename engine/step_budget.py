"""How many prompt tokens a step may compute beside its decodes, from how long steps have taken. Pure.

Owned by the scheduler. The time of a step is taken as that of its decodes alone plus a cost for each prompt token:

    decodes     smoothed durations of steps without prompt tokens, by number of sequences in powers of two
    a token     what was left of a mixed step's duration, divided by its prompt tokens; a rise counts at once, a fall
                slowly, so that one step over the limit is not followed by a second of the same size
"""

from __future__ import annotations

MIN_PREFILL_TOKENS = 16
"""A step computes so many whatever the limit: prefill must end, and smaller chunks cost as much."""
_SMOOTHING = 0.2


class StepBudget:
    def __init__(self, max_step_s: float | None) -> None:
        """None: no limit."""
        self._max_step_s = max_step_s
        self._decode_s: dict[int, float] = {}
        self._token_s: float | None = None

    def max_prefill_tokens(self, num_decodes: int, max_tokens: int) -> int:
        """At most `max_tokens`, which nothing limits while no decode waits for the step or nothing was measured."""
        if self._max_step_s is None or self._token_s is None or not num_decodes:
            return max_tokens
        left_s = self._max_step_s - self._expected_decode_s(num_decodes)
        return min(max_tokens, max(MIN_PREFILL_TOKENS, int(left_s / self._token_s)))

    def observe(self, num_decodes: int, num_prefill_tokens: int, duration_s: float) -> None:
        """A step has taken `duration_s`."""
        if self._max_step_s is None or duration_s <= 0.0:
            return
        if not num_prefill_tokens:
            bucket = num_decodes.bit_length()
            before = self._decode_s.get(bucket, duration_s)
            self._decode_s[bucket] = before + _SMOOTHING * (duration_s - before)
        elif num_prefill_tokens >= MIN_PREFILL_TOKENS:
            token_s = max(duration_s - self._expected_decode_s(num_decodes), 0.0) / num_prefill_tokens
            if self._token_s is None or token_s > self._token_s:
                self._token_s = max(token_s, 1e-9)
            else:
                self._token_s += _SMOOTHING * (token_s - self._token_s)
                self._token_s = max(self._token_s, 1e-9)

    def _expected_decode_s(self, num_decodes: int) -> float:
        """Of the nearest size that was seen; the larger of two."""
        if not num_decodes or not self._decode_s:
            return 0.0
        bucket = num_decodes.bit_length()
        return self._decode_s[min(self._decode_s, key=lambda seen: (abs(seen - bucket), -seen))]
