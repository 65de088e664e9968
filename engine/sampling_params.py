"""How the next token is chosen: the numbers a request carries to whichever worker samples for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import InvalidRequest

GREEDY_EPSILON = 1e-5
"""A temperature below this is greedy: dividing logits by less would overflow without changing the winner."""

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MIN_SEED = -(2**63)
MAX_CHOICE = 2**31 - 1
MAX_BAD_WORDS = 2048
MAX_BAD_WORD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one choice of one request.

    Every random draw depends on (seed, choice, index of the output token) only, so `seed` is always set: the
    gateway draws one for a request that has none.
    """

    max_tokens: int
    """Output tokens in all, those that another worker has already made included. At least 1."""
    min_tokens: int = 0
    """Stop tokens cannot be sampled before this many output tokens exist."""
    temperature: float = 1.0
    """0 and anything below GREEDY_EPSILON is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens; 1 is off (Keskar et al., CTRL, 2019)."""
    presence_penalty: float = 0.0
    """Over output tokens only."""
    frequency_penalty: float = 0.0
    """Over output tokens only, times their count."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """End the request when sampled: the model's end-of-sequence ids (unless ignored) and the client's."""
    logprobs: int | None = None
    """None: none. k: the chosen token's log probability and those of the k likeliest tokens, of the model's
    distribution before temperature, penalties and truncation."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output may not contain: the last token of one cannot follow the others."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that can be sampled; empty allows all. Stop tokens are no exception."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the tokens of the prompt but the first, which nothing predicts. The whole prompt is computed
    for it: a cached prefix has no logits."""
    grammar: str = ""
    """What the output has to follow, as of engine.grammar; empty is anything."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field out of range."""
        _in_range("max_tokens", self.max_tokens, 1, math.inf)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0", "top_p")
        _in_range("top_k", self.top_k, 0, math.inf)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("seed", self.seed, MIN_SEED, MAX_SEED)
        _in_range("choice", self.choice, 0, MAX_CHOICE)
        for token_id, bias in self.logit_bias.items():
            _in_range("logit_bias", token_id, 0, vocab_size - 1)
            _in_range("logit_bias", bias, -100.0, 100.0)
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, vocab_size - 1)
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_range("logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        for token_id in self.allowed_token_ids:
            _in_range("allowed_token_ids", token_id, 0, vocab_size - 1)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"bad_words has more than {MAX_BAD_WORDS} token sequences", "bad_words")
        for word in self.bad_words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(f"each of bad_words must be 1 to {MAX_BAD_WORD_TOKENS} tokens", "bad_words")
            for token_id in word:
                _in_range("bad_words", token_id, 0, vocab_size - 1)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    # "not (low <= value)" rather than "value < low": NaN fails both comparisons and must be refused.
    if not low <= value <= high or not math.isfinite(value):
        bounds = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", name)
