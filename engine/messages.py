"""What crosses between the engine thread and its owner: commands in, events out. Pure.

The owner (a service's event loop) submits commands; the engine answers with events, one batch a step.
A request lives in exactly one of these ways:

    AddRequest                      -> TokenOut* -> Finished
    AddRequest(prefill_only=True)   -> KvComputed* -> TokenOut -> PrefillDone -> [ReadKv -> KvRead]*
                                    -> Release -> Released
                                       (a first token that ends the request: TokenOut -> Finished, nothing is held)
    Reserve                         -> Reserved -> [WriteKv -> KvWritten]* -> StartDecode -> TokenOut* -> Finished
                                    -> Refused
    a request that decodes: Hold    -> Held(ok) -> [ReadKv -> KvRead]* -> Release -> Released
                                                -> Resume -> TokenOut* -> Finished
Abort ends any of them with Finished(reason="abort") once its blocks are back in the pool; Abort or Release of
an id that is unknown or has ended is ignored, so both may be sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Buffer = npt.NDArray[np.uint8]
"""1-D contiguous host bytes. On the wire and in every Buffer, KV has the layout
(layers, 2, tokens, kv_heads, head_dim), K before V."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Output tokens that another worker, or this one before a preemption, has already made."""
    cache_domain: bytes = b""
    """Requests of different domains (tenant, salt) never share cached blocks."""
    prefill_only: bool = False
    """Compute the prompt, sample one token, then hold the blocks until Release."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


# Commands


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Queue a request whose whole uncached part is computed here."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Reserve:
    """Take blocks for every token of the request now, or be Refused. KV will come from elsewhere."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class WriteKv:
    """Scatter `buffer` (KV of tokens [start, start + num_tokens)) into the blocks of a reserved request."""

    request_id: str
    start: int
    num_tokens: int
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class StartDecode:
    """All KV of the reserved request is written; go on from `token_id`, the output token sampled elsewhere."""

    request_id: str
    token_id: int


@dataclass(frozen=True, slots=True)
class ReadKv:
    """Gather KV of tokens [start, start + num_tokens) of a prefill_only request into `buffer`."""

    request_id: str
    start: int
    num_tokens: int
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of the blocks of a prefill_only request that is done. Full blocks stay in the prefix cache."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Compute no more of a request that decodes, and keep its blocks, so that another worker can go on with it.
    KV of every token but the last one sampled may be read. May be sent twice."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on with a request that Hold stopped."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request whatever its state."""

    request_id: str


Command = AddRequest | Reserve | WriteKv | StartDecode | ReadKv | Release | Hold | Resume | Abort


# Events


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one output position."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log probability), likeliest first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class TokenOut:
    request_id: str
    index: int
    """Position in the output, from 0."""
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of prompt tokens [start, start + len(logprobs)). In order, before the first TokenOut."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Seconds on the engine's side, and tokens it did not have to compute."""

    queue_s: float = 0.0
    """From the command to the first step that ran the request."""
    prefill_s: float = 0.0
    """From that step to the first token made here (0 for a request whose KV was shipped in)."""
    first_step_s: float = 0.0
    """From StartDecode to the first token made here (0 unless KV was shipped in)."""
    decode_s: float = 0.0
    """From the first to the last token made here."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    reason: FinishReason
    stats: RequestStats
    message: str = ""
    """Only for reason "error"."""


@dataclass(frozen=True, slots=True)
class KvComputed:
    """KV of tokens [0, num_tokens) of a prefill_only request is in its blocks and may be read."""

    request_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The first token was sampled and does not end the request; the blocks are held until Release."""

    request_id: str
    stats: RequestStats


@dataclass(frozen=True, slots=True)
class Released:
    request_id: str


@dataclass(frozen=True, slots=True)
class Held:
    """The answer to Hold. Not ok: the request was not decoding, and goes on as it was."""

    request_id: str
    ok: bool
    num_tokens: int = 0
    """Tokens whose KV is there."""


@dataclass(frozen=True, slots=True)
class Reserved:
    request_id: str
    num_cached_tokens: int
    """KV of tokens [0, num_cached_tokens) is already here; the rest must be written."""


@dataclass(frozen=True, slots=True)
class Refused:
    """ "busy": not now, no block was taken. "invalid": never; `message` and `param` say why."""

    request_id: str
    reason: Literal["busy", "invalid"]
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class KvRead:
    request_id: str
    start: int
    num_tokens: int
    ok: bool
    """False: the request has ended, the buffer holds nothing."""


@dataclass(frozen=True, slots=True)
class KvWritten:
    request_id: str
    start: int
    num_tokens: int
    ok: bool
    """False: the request has ended, nothing was written."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The step loop ended with an exception. The last event there is."""

    message: str


Event = (
    TokenOut
    | PromptScored
    | Finished
    | KvComputed
    | PrefillDone
    | Released
    | Held
    | Reserved
    | Refused
    | KvRead
    | KvWritten
    | EngineFailed
)


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Blocks of the pool by state; the counts sum to `num_blocks`."""

    num_blocks: int
    free: int
    cached: int
    """Hold a prefix that can be hit; reclaimed when needed."""
    running: int
    reserved: int
    held: int
    """Kept after prefill until the receiver has acknowledged."""
    requests: Mapping[str, int]
    """Number of requests by state: waiting, running, reserved, held."""
    oldest: Mapping[str, float]
    """state -> when the oldest in it came into it, on the engine's clock: the states of requests, and "cached" for
    blocks. Only states that are not empty."""
