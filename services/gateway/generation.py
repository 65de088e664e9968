"""A request that generates, from its body to its last byte, whatever the API it speaks.

    read -> plan (pool: parse, check, render, tokenize) -> jobs on the workers -> choices -> answer

On the event loop. The client's leaving, at any point, cancels the work; cancelling it closes the worker streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import aclosing
from typing import Protocol

from starlette.types import Receive, Scope, Send

from services.gateway.choice import Choice
from services.gateway.choices import run_choices
from services.gateway.errors import ApiError, ClientGone, DeadlinePassed, Failed, Forbidden, Unavailable
from services.gateway.exchange import STALLED, Exchange
from services.gateway.gateway import Gateway
from services.gateway.job import Job
from services.gateway.output import Delta, Ending, Result, Usage
from services.gateway.plan import Answer, AnswerHead, Api, Plan
from services.gateway.tenants.guard import rate_limited
from services.gateway.tenants.keys import Identity
from services.gateway.text.text_stream import TextStream
from services.gateway.timeline import Timeline

logger = logging.getLogger(__name__)
CLASS_SHIFT = 33
"""A request's own priority orders it within the class of its key only."""


class GenerationEndpoint:
    """An ASGI application."""

    def __init__(self, gateway: Gateway, api: Api) -> None:
        self._gateway = gateway
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        request_id = f"{self._api.id_prefix}{self._api.id_separator}{uuid.uuid4().hex}"
        exchange = Exchange(scope, receive, send, request_id, gateway.config.stall_timeout_s)
        timeline = Timeline(request_id, self._api.name, time.time(), _now(), exchange.header("x-request-id"))
        gateway.timelines.begin(timeline)
        gateway.num_running += 1
        try:
            timeline.outcome = await self._run(exchange, timeline)
        finally:
            gateway.num_running -= 1
            timeline.finish(_now())
            exchange.identity.meter.take_output(timeline.num_output_tokens, _now())
            gateway.metrics.output_tokens.inc(timeline.num_output_tokens)
            gateway.timelines.end(timeline)
            gateway.metrics.requests.labels(self._api.name, timeline.outcome).inc()
            gateway.metrics.total.observe(timeline.total_s or 0.0)

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
            await exchange.fail(problem, self._api.error_body(problem), self._api.error_event(problem))
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
                plan = await self._gateway.pool.run(
                    min(deadline - _now(), self._gateway.config.prepare_timeout_s),
                    self._api.plan,
                    body,
                    self._gateway.context_tokens(),
                )
                self._admit(exchange.identity, plan)
                choices = self._choices(plan, exchange.identity, timeline, deadline)
                await self._answer(exchange, plan, choices, timeline)
        except TimeoutError:
            seconds = self._gateway.config.request_timeout_s
            raise DeadlinePassed(f"the request was not finished within {seconds:.0f} s") from None

    def _admit(self, identity: Identity, plan: Plan) -> None:
        model = self._gateway.config.model_name
        if not identity.may_use(model):
            raise Forbidden(f"this API key may not use the model {model!r}", param="model")
        refusal = identity.meter.take_prompt(plan.num_prompt_tokens, _now())
        if refusal is not None:
            raise rate_limited(refusal)

    def _choices(self, plan: Plan, identity: Identity, timeline: Timeline, deadline: float) -> list[Choice]:
        gateway = self._gateway
        timeline.tokenize_s = _now() - timeline.began
        timeline.num_prompt_tokens = plan.num_prompt_tokens
        timeline.tenant = identity.tenant or None
        gateway.metrics.prompt_tokens.inc(plan.num_prompt_tokens)
        tokenizer, eos = gateway.text.tokenizer, gateway.text.config.eos_token_ids
        cache_domain = identity.cache_domain(plan.cache_salt)
        priority = (identity.priority << CLASS_SHIFT) + plan.priority
        choices = []
        for index in range(plan.num_choices):
            prompt = plan.prompts[index // plan.n]
            job = Job(
                timeline.request_id if plan.num_choices == 1 else f"{timeline.request_id}-{index}",
                prompt.token_ids,
                prompt.sampling.of_choice(index % plan.n),
                deadline,
                gateway.admission.ticket(priority),
                timeline.of_choice(index, len(prompt.token_ids)) if plan.num_choices > 1 else timeline,
                cache_domain,
            )
            stream = TextStream(
                tokenizer.detokenizer(prompt.token_ids, keep_special=plan.text.keep_special),
                plan.text.stops,
                job.sampling.stop_token_ids,
                min_tokens=job.sampling.min_tokens,
                include_stop=plan.text.include_stop,
            )
            choices.append(
                Choice(
                    index,
                    job,
                    stream,
                    plan.text,
                    echo=prompt.echo,
                    prompt_offsets=prompt.offsets,
                    parser=plan.parser(),
                    eos_token_ids=eos,
                )
            )
        return choices

    async def _answer(self, exchange: Exchange, plan: Plan, choices: list[Choice], timeline: Timeline) -> None:
        head = AnswerHead(exchange.request_id, int(timeline.arrived), self._gateway.system_fingerprint())
        answer = plan.answer(head)
        writer: _Writer = (_EventWriter if plan.stream else _WholeWriter)(exchange, answer, len(choices))
        async with aclosing(run_choices(self._gateway.handoffs.run, choices, plan.n)) as steps:
            async for choice, delta, ending in steps:
                self._note(choice, ending)
                await writer.add(choice.index, delta, ending)
        num_cached = timeline.cached_tokens(plan.n)
        self._gateway.metrics.cached_tokens.inc(num_cached or 0)
        num_output = sum(choice.num_tokens for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        await writer.end(Usage(timeline.num_prompt_tokens, num_output, num_cached, num_reasoning))

    def _note(self, choice: Choice, ending: Ending | None) -> None:
        """When tokens came, and how it ended."""
        timeline, metrics = choice.job.timeline, self._gateway.metrics
        if ending is not None:
            timeline.finish_reason = ending.reason
            metrics.finishes.labels(ending.reason).inc()
        if choice.num_tokens == timeline.num_output_tokens:
            return
        now = _now() - timeline.began
        if timeline.first_token_at is None:
            timeline.first_token_at = now
            metrics.ttft.observe(now)
        elif timeline.last_token_at is not None:
            metrics.itl.observe(now - timeline.last_token_at)
        timeline.last_token_at, timeline.num_output_tokens = now, choice.num_tokens


class _Writer(Protocol):
    async def add(self, choice: int, delta: Delta, ending: Ending | None) -> None: ...

    async def end(self, usage: Usage) -> None: ...


class _EventWriter:
    """The status line waits for the first token: what fails before it is an HTTP error."""

    def __init__(self, exchange: Exchange, answer: Answer, num_choices: int) -> None:
        self._exchange = exchange
        self._answer = answer
        self._left = num_choices
        self._kept = b""
        """The finish of the last choice: it goes out together with what follows it."""

    async def add(self, choice: int, delta: Delta, ending: Ending | None) -> None:
        events = b""
        if not self._exchange.started:
            await self._exchange.start_events()
            events = self._answer.start()
        if delta:
            events += self._answer.delta(choice, delta)
        if ending is not None:
            events += self._answer.finish(choice, ending)
            self._left -= 1
            if not self._left:
                self._kept = events
                return
        if events:
            await self._exchange.events(events)

    async def end(self, usage: Usage) -> None:
        await self._exchange.events(self._kept + self._answer.end(usage), last=True)


class _WholeWriter:
    def __init__(self, exchange: Exchange, answer: Answer, num_choices: int) -> None:
        self._exchange = exchange
        self._answer = answer
        self._results = [Result() for _ in range(num_choices)]

    async def add(self, choice: int, delta: Delta, ending: Ending | None) -> None:
        self._results[choice].add(delta)
        self._results[choice].ending = ending

    async def end(self, usage: Usage) -> None:
        await self._exchange.answer(self._answer.body(self._results, usage))


def _now() -> float:
    return asyncio.get_running_loop().time()
