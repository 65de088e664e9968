"""The seam between the engine's pure side and its torch side: what one step computes, and what comes back. Pure.

The engine builds a StepBatch, a Runner executes it. Every call runs on the engine thread, so a runner needs no
locks, and a batch is valid only until the call returns: token lists and block tables are the engine's own lists,
passed by reference, and must be neither changed nor kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.messages import Buffer, TokenLogprobs
from engine.sampling_params import SamplingParams

Slots = npt.NDArray[np.int64]
"""Positions in the paged cache, one a token: block_id * block_size + offset in the block."""


@dataclass(frozen=True, slots=True)
class SampleInput:
    """What choosing the next token of one sequence depends on, beside its logits."""

    params: SamplingParams
    output_index: int
    """Position in the output of the token to be sampled: len(output_token_ids)."""
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    allowed: npt.NDArray[np.bool_] | None = None
    """(vocab_size,) Tokens that the request's grammar allows here; None allows all."""


@dataclass(frozen=True, slots=True)
class ScoreInput:
    """Log probabilities that are wanted of a prompt: row `first_row + i` of the sequence's part of the step is to be
    scored against `token_ids[i]`, the token that follows it."""

    first_row: int
    token_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class ScheduledSeq:
    """One sequence's part of a step."""

    request_id: str
    token_ids: Sequence[int]
    """Tokens to compute: one for a decode, a chunk for a prefill. Never empty."""
    start: int
    """Position of the first of them, which is the number of tokens whose KV the cache already holds."""
    block_table: Sequence[int]
    """Block ids. Covers at least start + len(token_ids) tokens; entries past that may be there."""
    sample: SampleInput | None
    """None: a chunk that does not reach the end of the sequence."""
    score: ScoreInput | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    seqs: Sequence[ScheduledSeq]
    block_size: int
    scored: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """What the runner found for each sequence with `score`, by request id."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None
    """None unless SamplingParams.logprobs asked for them."""


class Runner(Protocol):
    """Model, KV cache and sampler."""

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        """Write the KV of every token of the batch into the cache and sample where asked.

        Returns one SampledToken for each sequence with `sample`, in the order of the batch. KV is readable
        (read_kv, the next execute) once this returns. An exception ends the engine.
        """
        ...

    def read_kv(self, slots: Slots, buffer: Buffer) -> None:
        """Gather the KV of `slots` into `buffer`, of exactly len(slots) * kv_bytes_per_token bytes, in the layout
        (layers, 2, len(slots), kv_heads, head_dim). The buffer is full once this returns."""
        ...

    def write_kv(self, slots: Slots, buffer: Buffer) -> None:
        """Scatter `buffer`, laid out as for read_kv, into `slots`. The buffer may be reused once this returns."""
        ...

    @property
    def kv_bytes_per_token(self) -> int:
        """2 * layers * kv_heads * head_dim * itemsize."""
        ...
