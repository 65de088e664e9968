"""Which tokens a grammar allows next. The only importer of llguidance; no tensors.

A grammar is llguidance's own JSON: {"grammars": [{"json_schema": {...}}]}, or lark_grammar in its place. What is
allowed is a function of the grammar and of the output tokens, so nothing of it travels with a handoff, a retry or a
migration: whoever goes on reads the output tokens it is given.

`Grammars` belongs to a worker: `prepare` runs on any thread, `state` and what it returns on the engine thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, InvalidRequest

MAX_GRAMMAR_BYTES = 256 << 10
MAX_CACHED = 128
PARAM = "response_format"
Allowed = npt.NDArray[np.bool_]
"""(vocab_size,)"""

_LIMITS = llguidance.LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, max_grammar_size=500_000)
"""Work that one grammar may cost: to compile, and at each token."""


def check_grammar(grammar: str) -> None:
    """Raises InvalidRequest. Needs no tokenizer: a grammar that passes can be compiled for any vocabulary, unless
    it is too large for one."""
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes", PARAM)
    problem = llguidance.LLMatcher.validate_grammar(grammar, limits=_LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequest(f"the grammar cannot be used: {_first_line(problem)}", PARAM)


class GrammarState:
    """What one request's output has made of its grammar. Kept by the request, from its first mask to its end."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size
        self._num_read = 0
        self.problem = ""
        """Why no more masks can be had: the grammar has grown beyond its limits, or the output does not fit it."""

    def allowed(self, output_token_ids: Sequence[int]) -> Allowed:
        """Tokens that may follow this output, which begins with that of the last call. End tokens are among them
        once the grammar is complete, and the only ones once nothing else can follow."""
        unread = list(output_token_ids[self._num_read :])
        self._num_read = len(output_token_ids)
        if not self.problem and unread and not self._matcher.consume_tokens(unread):
            self.problem = "the output does not fit its grammar"
        self._words[:] = 0
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._words, 0)
        if not self.problem and self._matcher.is_error():
            self.problem = f"the grammar cannot go on: {_first_line(self._matcher.get_error())}"
        bits = np.unpackbits(self._words.view(np.uint8).reshape(-1), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)


class Grammars:
    """Compiled grammars of one vocabulary, the last used ones kept. The tokenizer is loaded when first needed."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._access = threading.Lock()

    def prepare(self, grammar: str) -> None:
        """Compile it, unless that has been done. Slow, and lets go of the interpreter lock meanwhile. Raises
        InvalidRequest, or ConfigError for a model without a usable tokenizer."""
        with self._access:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return
        check_grammar(grammar)
        matcher = llguidance.LLMatcher(self._loaded(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"the grammar cannot be used: {_first_line(matcher.get_error())}", PARAM)
        with self._access:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)

    def state(self, grammar: str) -> GrammarState:
        """At its start. Compiles on the spot what has not been prepared, or been forgotten since."""
        self.prepare(grammar)
        with self._access:
            matcher = self._compiled[grammar]
        return GrammarState(matcher.deep_copy(), self._vocab_size)

    def _loaded(self) -> llguidance.LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
                    )
                except Exception as error:  # the library raises whatever its parts do
                    raise ConfigError(f"{self._path} cannot be used for grammars: {error}") from error
            return self._tokenizer


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
