"""POST /v1/chat/completions and /v1/completions: one request from its body to its last byte.

    read -> parse -> render and tokenize (pool) -> check the context -> tokens from the workers -> text -> answer

On the event loop. The client's leaving, at any point, cancels the work; cancelling it closes the worker streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from services.gateway.errors import (
    ApiError,
    ClientGone,
    ContextTooLong,
    DeadlinePassed,
    Failed,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from services.gateway.exchange import STALLED, Exchange
from services.gateway.gateway import Gateway
from services.gateway.job import Job, NewTokens
from services.gateway.openai.answers import Answer, ChatAnswer, CompletionAnswer, ScoredToken, Usage
from services.gateway.openai.prompts import Prompt, read_messages, read_prompt
from services.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from services.gateway.openai.sampling import fit_max_tokens, read_stops, requested_tokens, to_sampling
from services.gateway.text.chat_template import TemplateError
from services.gateway.text.model_text import TextTooLong
from services.gateway.text.text_stream import TextStream
from services.gateway.timeline import Timeline

logger = logging.getLogger(__name__)


class GenerationEndpoint(ABC):
    """An ASGI application. Subclasses say what differs between the two APIs."""

    name: str
    id_prefix: str
    answer_type: type[Answer]

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    @abstractmethod
    def _parse(self, body: bytes) -> GenerationRequest: ...

    @abstractmethod
    def _tokenize(self, request: Any, max_tokens: int) -> list[int]:
        """On a pool thread."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        request_id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        exchange = Exchange(scope, receive, send, request_id, gateway.config.stall_timeout_s)
        timeline = Timeline(request_id, self.name, time.time(), _now(), exchange.header("x-request-id"))
        gateway.timelines.begin(timeline)
        gateway.num_running += 1
        try:
            timeline.outcome = await self._run(exchange, timeline)
        finally:
            gateway.num_running -= 1
            timeline.total_s = _now() - timeline.began
            gateway.metrics.output_tokens.inc(timeline.num_output_tokens)
            gateway.timelines.end(timeline)
            gateway.metrics.requests.labels(self.name, timeline.outcome).inc()
            gateway.metrics.total.observe(timeline.total_s)

    async def _run(self, exchange: Exchange, timeline: Timeline) -> str:
        """The outcome, as metrics name it. Raises nothing but a cancellation from outside."""
        try:
            await self._until_gone(exchange, timeline)
            return "success"
        except ClientGone as gone:
            logger.info("request %s: 499, the client %s", exchange.request_id, gone.reason)
            return "client_closed"
        except ApiError as error:
            problem = error
        except Exception:
            logger.exception("request %s: a fault of ours", exchange.request_id)
            problem = Failed("internal error")
        logger.info("request %s: %d %s", exchange.request_id, problem.status, problem)
        try:
            await exchange.fail(problem)
        except ClientGone:
            return "client_closed"
        return str(problem.status)

    async def _until_gone(self, exchange: Exchange, timeline: Timeline) -> None:
        config = self._gateway.config
        if self._gateway.draining:
            raise Unavailable("this gateway is being stopped")
        body = await exchange.body(config.max_body_bytes, config.body_timeout_s)
        work = asyncio.create_task(self._serve(exchange, timeline, body))
        gone, stalled = asyncio.create_task(exchange.gone()), asyncio.create_task(exchange.stalled())
        try:
            await asyncio.wait({work, gone, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone if gone.done() else ClientGone(STALLED)
            await work
        finally:
            for task in (work, gone, stalled):
                task.cancel()
            # Not abandoned: the streams to the workers are closed in there.
            await asyncio.wait({work, gone, stalled})

    async def _serve(self, exchange: Exchange, timeline: Timeline, body: bytes) -> None:
        deadline = timeline.began + self._gateway.config.request_timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                request, prompt = await self._gateway.pool.run(
                    min(deadline - _now(), self._gateway.config.prepare_timeout_s),
                    self._read_body,
                    body,
                    self._gateway.context_tokens(),
                )
                job, stream = self._prepare(request, prompt, timeline, deadline)
                await self._answer(exchange, request, job, stream)
        except TimeoutError:
            seconds = self._gateway.config.request_timeout_s
            raise DeadlinePassed(f"the request was not finished within {seconds:.0f} s") from None

    def _check_model(self, name: str) -> None:
        if name != self._gateway.config.model_name:
            message = f"The model {name!r} does not exist; this is {self._gateway.config.model_name!r}"
            raise NotFound(message, param="model", code="model_not_found")

    def _read_body(self, body: bytes, context: int) -> tuple[GenerationRequest, list[int]]:
        """On a pool thread: the checked request and its prompt. Cheap checks come before the tokenizer."""
        request = self._parse(body)
        self._check_model(request.model)
        read_stops(request.stop)
        requested_tokens(request)
        try:
            prompt = self._tokenize(request, context)
        except TextTooLong as error:
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens, but the prompt has at least "
                f"{error.min_num_tokens}.",
                param=self._prompt_param,
            ) from None
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        if not prompt:
            raise InvalidRequest(f"{self._prompt_param} has no tokens", param=self._prompt_param)
        return request, prompt

    def _prepare(
        self, request: GenerationRequest, prompt: list[int], timeline: Timeline, deadline: float
    ) -> tuple[Job, TextStream]:
        gateway, text = self._gateway, self._gateway.text
        timeline.tokenize_s = _now() - timeline.began
        timeline.num_prompt_tokens = len(prompt)
        max_tokens = fit_max_tokens(request, len(prompt), gateway.context_tokens())
        sampling = to_sampling(request, max_tokens, text.config.eos_token_ids, text.config.vocab_size)
        gateway.metrics.prompt_tokens.inc(len(prompt))
        job = Job(timeline.request_id, prompt, sampling, deadline, gateway.admission.ticket(), timeline)
        stream = TextStream(
            text.tokenizer.detokenizer(prompt),
            read_stops(request.stop),
            sampling.stop_token_ids,
            min_tokens=sampling.min_tokens,
        )
        return job, stream

    async def _answer(self, exchange: Exchange, request: GenerationRequest, job: Job, stream: TextStream) -> None:
        answer = self.answer_type(
            exchange.request_id,
            request.model,
            int(job.timeline.arrived),
            self._gateway.text.tokenizer.spelling,
            include_usage=request.include_usage,
            scored=job.sampling.logprobs is not None,
        )
        writer = _EventWriter(exchange, answer) if request.stream else _WholeWriter(exchange, answer)
        async with aclosing(self._gateway.handoffs.run(job)) as batches:
            async for batch in batches:
                text, scored = self._read(job, stream, batch)
                await writer.text(text, scored)
                if stream.stopped:
                    break
        rest = stream.flush()
        if rest:
            await writer.text(rest, [])
        reason = "stop" if stream.stopped else job.finish_reason
        assert reason is not None, "the tokens of a job end with a reason"
        job.timeline.finish_reason = reason
        self._gateway.metrics.finishes.labels(reason).inc()
        self._gateway.metrics.cached_tokens.inc(job.timeline.num_cached_tokens or 0)
        usage = Usage(len(job.prompt_token_ids), stream.num_tokens, job.timeline.num_cached_tokens)
        await writer.end(reason, usage)

    def _read(self, job: Job, stream: TextStream, batch: NewTokens) -> tuple[str, list[ScoredToken]]:
        """Text and log probabilities of new tokens; notes when they came."""
        text, scored = "", []
        for token_id, logprob in batch:
            if logprob is not None:
                scored.append(ScoredToken(token_id, logprob, stream.num_chars))
            text += stream.push(token_id)
            if stream.stopped:
                break
        timeline, metrics, now = job.timeline, self._gateway.metrics, _now() - job.timeline.began
        if timeline.first_token_at is None:
            timeline.first_token_at = now
            metrics.ttft.observe(now)
        elif timeline.last_token_at is not None:
            metrics.itl.observe(now - timeline.last_token_at)
        timeline.last_token_at, timeline.num_output_tokens = now, stream.num_tokens
        return text, scored

    @property
    def _prompt_param(self) -> str:
        return "messages" if self.answer_type is ChatAnswer else "prompt"


class ChatEndpoint(GenerationEndpoint):
    name = "chat.completions"
    id_prefix = "chatcmpl"
    answer_type = ChatAnswer

    def _parse(self, body: bytes) -> ChatRequest:
        return parse_chat(body)

    def _tokenize(self, request: ChatRequest, max_tokens: int) -> list[int]:
        return self._gateway.text.chat_prompt(read_messages(request.messages), max_tokens)


class CompletionEndpoint(GenerationEndpoint):
    name = "completions"
    id_prefix = "cmpl"
    answer_type = CompletionAnswer

    def _parse(self, body: bytes) -> CompletionRequest:
        return parse_completion(body)

    def _tokenize(self, request: CompletionRequest, max_tokens: int) -> list[int]:
        text = self._gateway.text
        if request.prompt is None:
            raise InvalidRequest("you must provide a prompt parameter", param="prompt")
        prompt: Prompt = read_prompt(request.prompt, text.config.vocab_size)
        return text.text_prompt(prompt, max_tokens) if isinstance(prompt, str) else prompt


class _EventWriter:
    """The status line waits for the first token: what fails before it is an HTTP error."""

    def __init__(self, exchange: Exchange, answer: Answer) -> None:
        self._exchange = exchange
        self._answer = answer

    async def text(self, text: str, scored: list[ScoredToken]) -> None:
        events = await self._started()
        if text or scored:
            events += self._answer.text_event(text, scored)
        if events:
            await self._exchange.events(events)

    async def end(self, reason: str, usage: Usage) -> None:
        events = await self._started()
        await self._exchange.events(events + self._answer.last_events(reason, usage), last=True)

    async def _started(self) -> bytes:
        """What is to be sent before anything else."""
        if self._exchange.started:
            return b""
        await self._exchange.start_events()
        return self._answer.first_event()


class _WholeWriter:
    def __init__(self, exchange: Exchange, answer: Answer) -> None:
        self._exchange = exchange
        self._answer = answer
        self._text: list[str] = []
        self._scored: list[ScoredToken] = []

    async def text(self, text: str, scored: list[ScoredToken]) -> None:
        self._text.append(text)
        self._scored += scored

    async def end(self, reason: str, usage: Usage) -> None:
        await self._exchange.answer(self._answer.body("".join(self._text), self._scored, reason, usage))


def _now() -> float:
    return asyncio.get_running_loop().time()
