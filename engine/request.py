"""One request inside the engine: its tokens, its blocks, its times. Pure; only the scheduler changes it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.block_hash import extend_keys
from engine.messages import EngineRequest, RequestStats


class OutputGrammar(Protocol):
    """What a request's output has to follow; engine.grammar has it."""

    problem: str
    """Why it cannot be followed any further; empty while it can."""

    def allowed(self, output_token_ids: Sequence[int]) -> npt.NDArray[np.bool_]: ...


class RequestState(enum.Enum):
    """
    WAITING --admit--> RUNNING --first token, prefill_only; hold--> HELD --release--> ENDED
       ^---preempt-------'  ^-----------------resume------------'
    RESERVED --start--> RUNNING
    Every state but ENDED goes to ENDED on abort; only RUNNING ends by itself.
    """

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    HELD = "held"
    ENDED = "ended"


class Request:
    """Mutable. KV of tokens [0, num_computed) is in the blocks of block_table, which covers at least that."""

    __slots__ = (
        "arrival",
        "block_keys",
        "block_table",
        "first_step_at",
        "first_token_at",
        "grammar",
        "last_token_at",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scored",
        "output_token_ids",
        "prefill_only",
        "prefilling",
        "prompt_token_ids",
        "queued_at",
        "request_id",
        "root_key",
        "sampling",
        "since",
        "started_at",
        "state",
        "token_ids",
        "written",
    )

    def __init__(self, spec: EngineRequest, root_key: bytes, queued_at: float) -> None:
        self.request_id = spec.request_id
        self.sampling = spec.sampling
        self.prefill_only = spec.prefill_only
        self.prompt_token_ids = spec.prompt_token_ids
        self.num_prompt = len(spec.prompt_token_ids)
        self.output_token_ids = list(spec.output_token_ids)
        self.token_ids = [*spec.prompt_token_ids, *spec.output_token_ids]
        self.state = RequestState.WAITING
        self.since = queued_at
        """When it came into this state."""
        self.arrival = 0
        """Order in which the scheduler saw it: the smaller, the older."""
        self.block_table: list[int] = []
        self.num_computed = 0
        self.prefilling = True
        """Running, and no token sampled since it was admitted: it owns every block it needs and is not preempted."""
        self.written = TokenRanges()
        """Reserved: whose KV has been shipped in."""
        self.root_key = root_key
        self.block_keys: list[bytes] = []
        self.num_published = 0
        """Leading blocks whose keys the pool knows."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.grammar: OutputGrammar | None = None
        """Set by the engine for a request that has a grammar."""
        self.num_scored = 1 if spec.sampling.prompt_logprobs is not None else self.num_prompt
        """Leading prompt tokens whose log probabilities are known, or not wanted."""
        self.queued_at = queued_at
        self.first_step_at: float | None = None
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def full_block_keys(self, block_size: int) -> list[bytes]:
        """Keys of the blocks that its tokens fill. Grows with the tokens; what was hashed once is kept."""
        extend_keys(self.block_keys, self.root_key, self.token_ids, block_size)
        return self.block_keys

    def max_kv_tokens(self) -> int:
        """Tokens whose KV it can ever need: the last output token is never fed back."""
        if self.prefill_only:
            return self.num_tokens
        return self.num_prompt + self.sampling.max_tokens - 1

    def stats(self) -> RequestStats:
        first_token = self.first_token_at
        shipped = self.started_at is not None
        return RequestStats(
            queue_s=0.0 if shipped else _between(self.queued_at, self.first_step_at),
            prefill_s=0.0 if shipped else _between(self.first_step_at, first_token),
            first_step_s=_between(self.started_at, first_token),
            decode_s=_between(first_token, self.last_token_at),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=len(self.output_token_ids),
            num_preemptions=self.num_preemptions,
        )


class TokenRanges:
    """A set of token positions as sorted, disjoint, non-touching half-open ranges."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        kept = []
        for low, high in self._ranges:
            if high < start or end < low:
                kept.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        self._ranges = sorted([*kept, (start, end)])

    def first_missing(self, start: int, end: int) -> int | None:
        """The first position of [start, end) that is not in the set."""
        for low, high in self._ranges:
            if low <= start < high:
                start = high
        return start if start < end else None


def _between(start: float | None, end: float | None) -> float:
    return 0.0 if start is None or end is None else end - start
