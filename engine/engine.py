"""The engine: commands and steps in, events out. Single-threaded; engine.loop calls it on the engine thread.

A step is four verbs: schedule (which tokens), forward and sample (the runner), update (tokens out, requests ended).
What a request may go through is written at the head of engine.messages. An exception from the runner is not
caught: the KV cache can no longer be trusted, so the engine ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from engine.block_hash import root_key
from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest
from engine.grammar import Grammars, GrammarState
from engine.messages import (
    Abort,
    AddRequest,
    Buffer,
    Command,
    EngineRequest,
    Event,
    Finished,
    FinishReason,
    Held,
    Hold,
    KvComputed,
    KvRead,
    KvWritten,
    LedgerSnapshot,
    PrefillDone,
    PromptScored,
    ReadKv,
    Refused,
    Release,
    Released,
    Reserve,
    Reserved,
    Resume,
    StartDecode,
    TokenOut,
    WriteKv,
)
from engine.request import Request, RequestState
from engine.runner import Runner, SampledToken, SampleInput, ScheduledSeq, ScoreInput, Slots, StepBatch
from engine.scheduler import Scheduled, Scheduler

Clock = Callable[[], float]


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        vocab_size: int,
        model_fingerprint: bytes = b"",
        grammars: Grammars | None = None,
    ) -> None:
        """`model_fingerprint` goes into the keys of cached blocks. Without `grammars` none can be followed."""
        self._config = config
        self._runner = runner
        self._vocab_size = vocab_size
        self._model_fingerprint = model_fingerprint
        self._grammars = grammars
        self._scheduler = Scheduler(config)
        self._requests: dict[str, Request] = {}
        self._stalled = False

    def has_work(self) -> bool:
        """Whether a step can compute anything. What is stalled for want of blocks goes on after a command."""
        return self._scheduler.num_active > 0 and not self._stalled

    def is_empty(self) -> bool:
        return not self._requests

    def ledger(self) -> LedgerSnapshot:
        return self._scheduler.ledger()

    def check_integrity(self) -> None:
        """Assert that the ledger is consistent. Walks the pool: for idle moments and tests."""
        assert len(self._requests) == self._scheduler.num_requests, "a request that the scheduler does not know"
        self._scheduler.check_integrity()

    # Commands

    def handle(self, command: Command, now: float) -> list[Event]:
        self._stalled = False
        match command:
            case AddRequest(request):
                return self._add(request, now)
            case Reserve(request):
                return self._reserve(request, now)
            case WriteKv(request_id, start, num_tokens, buffer):
                ok = self._write_kv(request_id, start, num_tokens, buffer)
                return [KvWritten(request_id, start, num_tokens, ok)]
            case ReadKv(request_id, start, num_tokens, buffer):
                ok = self._read_kv(request_id, start, num_tokens, buffer)
                return [KvRead(request_id, start, num_tokens, ok)]
            case StartDecode(request_id, token_id):
                return self._start_decode(request_id, token_id, now)
            case Release(request_id):
                return self._release(request_id, now)
            case Hold(request_id):
                return self._hold(request_id, now)
            case Resume(request_id):
                held = self._requests.get(request_id)
                if held is not None and held.state is RequestState.HELD and not held.prefill_only:
                    self._scheduler.resume(held, now)
                return []
            case Abort(request_id):
                ended = self._requests.get(request_id)
                return [] if ended is None else [self._finish(ended, now, "abort")]

    def _add(self, spec: EngineRequest, now: float) -> list[Event]:
        try:
            request = self._accept(spec, now)
        except InvalidRequest as error:
            return [Refused(spec.request_id, "invalid", str(error), error.param)]
        self._requests[spec.request_id] = request
        self._scheduler.add(request)
        return []

    def _reserve(self, spec: EngineRequest, now: float) -> list[Event]:
        try:
            if spec.prefill_only:
                raise InvalidRequest("a prefill_only request cannot be reserved", "prefill_only")
            request = self._accept(spec, now)
        except InvalidRequest as error:
            return [Refused(spec.request_id, "invalid", str(error), error.param)]
        request.num_scored = request.num_prompt  # whoever computes the prompt scores it
        if not self._scheduler.reserve(request, now):
            return [Refused(spec.request_id, "busy", "no room for the request now")]
        self._requests[spec.request_id] = request
        return [Reserved(spec.request_id, request.num_cached_tokens)]

    def _accept(self, spec: EngineRequest, now: float) -> Request:
        """Raises InvalidRequest for what can never be served here."""
        if spec.request_id in self._requests:
            raise InvalidRequest(f"request {spec.request_id} is already here", "request_id")
        spec.sampling.validate(self._vocab_size)
        if not spec.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        for param, token_ids in (("prompt", spec.prompt_token_ids), ("output_token_ids", spec.output_token_ids)):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
                raise InvalidRequest(f"token ids must be between 0 and {self._vocab_size - 1}", param)
        self._check_length(spec)
        request = Request(spec, root_key(self._model_fingerprint, spec.cache_domain), now)
        if spec.sampling.grammar:
            request.grammar = self._grammar_state(spec.sampling.grammar)
        return request

    def _grammar_state(self, grammar: str) -> GrammarState:
        if self._grammars is None:
            raise InvalidRequest("grammars are not supported here", "response_format")
        try:
            return self._grammars.state(grammar)
        except ConfigError as error:
            raise InvalidRequest(str(error), "response_format") from error

    def _check_length(self, spec: EngineRequest) -> None:
        capacity, num_prompt = self._config.capacity_tokens, len(spec.prompt_token_ids)
        if spec.prefill_only:
            if spec.num_tokens > capacity:
                raise InvalidRequest(f"{spec.num_tokens} tokens are more than the {capacity} that fit here", "prompt")
        elif num_prompt >= capacity:
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens; prompt and output together may have {capacity}", "prompt"
            )
        elif num_prompt + spec.sampling.max_tokens > capacity:
            raise InvalidRequest(
                f"prompt ({num_prompt} tokens) and max_tokens ({spec.sampling.max_tokens}) are more than the "
                f"{capacity} tokens that prompt and output may have together",
                "max_tokens",
            )
        if spec.sampling.max_tokens <= len(spec.output_token_ids):
            raise InvalidRequest("max_tokens output tokens exist already", "max_tokens")

    def _start_decode(self, request_id: str, token_id: int, now: float) -> list[Event]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        problem = self._start_problem(request, token_id)
        if problem:
            return [self._finish(request, now, "error", problem)]
        self._scheduler.start(request, token_id, now)
        reason = _finish_reason(request)
        return [self._finish(request, now, reason)] if reason else []

    def _start_problem(self, request: Request, token_id: int) -> str:
        """Why decoding from `token_id` would be wrong: never decode from KV that is not all there."""
        if request.state is not RequestState.RESERVED:
            return f"StartDecode of a request that is {request.state.value}"
        missing = request.written.first_missing(request.num_cached_tokens, request.num_tokens)
        if missing is not None:
            return f"StartDecode before the KV of token {missing} was written"
        if not 0 <= token_id < self._vocab_size:
            return f"StartDecode from token id {token_id}, outside the vocabulary"
        return ""

    def _release(self, request_id: str, now: float) -> list[Event]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        if request.state is not RequestState.HELD:
            return [self._finish(request, now, "error", f"Release of a request that is {request.state.value}")]
        self._end(request, now)
        return [Released(request_id)]

    def _hold(self, request_id: str, now: float) -> list[Event]:
        request = self._requests.get(request_id)
        if request is None:
            return []
        paused = request.state is RequestState.HELD and not request.prefill_only
        if not paused and (request.state is not RequestState.RUNNING or request.prefilling):
            return [Held(request_id, ok=False)]
        if not paused:
            self._scheduler.hold(request, now)
        return [Held(request_id, ok=True, num_tokens=request.num_computed)]

    def _write_kv(self, request_id: str, start: int, num_tokens: int, buffer: Buffer) -> bool:
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.RESERVED:
            return False
        # Cached tokens lie in blocks that other requests share.
        if not self._fits(start, num_tokens, request.num_cached_tokens, request.num_tokens, buffer):
            return False
        self._runner.write_kv(self._slots(request, start, num_tokens), buffer)
        request.written.add(start, start + num_tokens)
        return True

    def _read_kv(self, request_id: str, start: int, num_tokens: int, buffer: Buffer) -> bool:
        request = self._requests.get(request_id)
        if request is None or not (request.prefill_only or request.state is RequestState.HELD):
            return False
        if not self._fits(start, num_tokens, 0, request.num_computed, buffer):
            return False
        self._runner.read_kv(self._slots(request, start, num_tokens), buffer)
        return True

    def _fits(self, start: int, num_tokens: int, first: int, end: int, buffer: Buffer) -> bool:
        in_range = num_tokens > 0 and first <= start and start + num_tokens <= end
        return in_range and buffer.nbytes == num_tokens * self._runner.kv_bytes_per_token

    def _slots(self, request: Request, start: int, num_tokens: int) -> Slots:
        block_size = self._config.block_size
        first_block = start // block_size
        last_block = (start + num_tokens - 1) // block_size
        blocks = np.asarray(request.block_table[first_block : last_block + 1], dtype=np.int64)
        slots: Slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
        offset = start - first_block * block_size
        return slots[offset : offset + num_tokens]

    # The step

    def step(self, now: Clock | float) -> list[Event]:
        """One schedule, forward, sample, update. `now` is read before and after the forward."""
        started = _read(now)
        step = self._scheduler.schedule(started)
        if not step:
            self._stalled = True
            return []
        batch = self._batch(step)
        sampled = self._runner.execute(batch)
        ended = _read(now)
        self._scheduler.took(step, ended - started)
        scores = [_take_scores(request, batch) for request, _ in step if batch.scored]
        return [event for event in scores if event] + self._update(step, iter(sampled), ended)

    def _batch(self, step: list[Scheduled]) -> StepBatch:
        return StepBatch([_scheduled_seq(*scheduled) for scheduled in step], self._config.block_size)

    def _update(self, step: list[Scheduled], sampled: Iterator[SampledToken], now: float) -> list[Event]:
        events: list[Event] = []
        for request, num_tokens in step:
            self._scheduler.computed(request, num_tokens)
            if not request.num_uncomputed:
                self._add_token(request, next(sampled), now, events)
            elif request.prefill_only:
                events.append(KvComputed(request.request_id, request.num_computed))
        assert next(sampled, None) is None, "the runner sampled more tokens than it was asked for"
        return events

    def _add_token(self, request: Request, token: SampledToken, now: float, events: list[Event]) -> None:
        if request.grammar is not None and request.grammar.problem:
            events.append(self._finish(request, now, "error", request.grammar.problem))
            return
        self._scheduler.sampled(request, token.token_id, now)
        index = len(request.output_token_ids) - 1
        token_out = TokenOut(request.request_id, index, token.token_id, token.logprobs)
        reason = _finish_reason(request)
        if reason:
            events += [token_out, self._finish(request, now, reason)]
        elif request.prefill_only:
            self._scheduler.hold(request, now)
            events.append(KvComputed(request.request_id, request.num_computed))
            events += [token_out, PrefillDone(request.request_id, request.stats())]
        else:
            events.append(token_out)

    def _finish(self, request: Request, now: float, reason: FinishReason, message: str = "") -> Finished:
        self._end(request, now)
        return Finished(request.request_id, reason, request.stats(), message)

    def _end(self, request: Request, now: float) -> None:
        del self._requests[request.request_id]
        self._scheduler.end(request, now)


def _scheduled_seq(request: Request, num_tokens: int) -> ScheduledSeq:
    start = request.num_computed
    end = start + num_tokens
    sample = None
    if end == len(request.token_ids):
        outputs = request.output_token_ids
        allowed = request.grammar.allowed(outputs) if request.grammar is not None else None
        sample = SampleInput(request.sampling, len(outputs), request.prompt_token_ids, outputs, allowed)
    score = _score_input(request, start, end) if request.num_scored < request.num_prompt else None
    return ScheduledSeq(request.request_id, request.token_ids[start:end], start, request.block_table, sample, score)


def _score_input(request: Request, start: int, end: int) -> ScoreInput | None:
    """Of the prompt tokens that tokens [start, end) predict, those not scored yet."""
    num_top = request.sampling.prompt_logprobs
    assert num_top is not None, "only who wants scores has some to come"
    wanted = request.token_ids[request.num_scored : min(end + 1, request.num_prompt)]
    return ScoreInput(request.num_scored - 1 - start, wanted, num_top) if wanted else None


def _take_scores(request: Request, batch: StepBatch) -> PromptScored | None:
    logprobs = batch.scored.get(request.request_id)
    if not logprobs:
        return None
    start = request.num_scored
    request.num_scored += len(logprobs)
    return PromptScored(request.request_id, start, logprobs)


def _finish_reason(request: Request) -> FinishReason | None:
    """Whether the last output token ends the request."""
    num_output = len(request.output_token_ids)
    sampling = request.sampling
    if num_output > sampling.min_tokens and request.output_token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if num_output >= sampling.max_tokens else None


def _read(now: Clock | float) -> float:
    return now() if callable(now) else now
