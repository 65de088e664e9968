"""Workers that speak the real wire protocol and do what a test tells them; no engine, no fabric.

Left alone, a stub is a perfect worker whose model answers with a fixed list of token ids. A test changes what the
next calls do by putting a Behaviour on `plan`. Everything runs on the event loop of a StubSystem; the fields that
tests read from their own thread are only ever appended to.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from services import auth, protocol
from services.protocol import (
    Accepted,
    Busy,
    Failure,
    Fingerprint,
    Finish,
    Frame,
    GenerateRequest,
    PrefillRequest,
    PromptLogprobs,
    Reservation,
    Reserved,
    Role,
    Stats,
    TokenLogprob,
    Tokens,
    Transferred,
    WorkerInfo,
)

FINGERPRINT = Fingerprint(wire_version=1, model="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=16)


class Gate:
    """Holds a stub at a chosen point until a test opens it. `open` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()


@dataclass
class Behaviour:
    """What one call does differently. Counts are of tokens sent in this call."""

    busy: bool = False
    status: int | None = None
    """Answer with this HTTP status instead of frames."""
    reset_before_answer: bool = False
    hold_before_answer: Gate | None = None
    hold_after: tuple[int, Gate] | None = None
    fail_after: tuple[int, Failure] | None = None
    cut_after: int | None = None
    """Break the connection, without a last word."""
    lose_finish: bool = False
    """Break the connection after the last token, before the frame that says so."""
    accept: bool = False
    """Decode computes the prompt itself although a handoff was offered."""
    tokens_a_frame: int = 1
    pause_scores: Gate | None = None
    """Prefill holds what it has to say of the prompt, and all after it, until this opens."""
    pause: Callable[[], Awaitable[None]] | None = None
    """Awaited between two tokens."""


@dataclass
class Call:
    """One call, as the stub saw it."""

    path: str
    request: GenerateRequest | PrefillRequest
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_tokens: int = 0
    ended: Literal["running", "finished", "cancelled", "broken"] = "running"


class Fabric:
    """Stands for the KV transfer between stubs: a commit is an event."""

    def __init__(self) -> None:
        self._committed: dict[bytes, asyncio.Event] = {}

    def committed(self, handoff_id: bytes) -> asyncio.Event:
        return self._committed.setdefault(handoff_id, asyncio.Event())


class _Break(Exception):
    """The connection is to be reset now."""


@dataclass
class StubWorker:
    """An ASGI application."""

    role: Role
    secret: str
    fabric: Fabric
    output: list[int]
    """What the model answers to anything."""
    output_of_choice: dict[int, list[int]] = field(default_factory=dict)
    """What it answers where a choice is not to answer that."""
    incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    state: Literal["loading", "ready", "draining", "failed"] = "ready"
    fingerprint: Fingerprint = FINGERPRINT
    capacity_tokens: int = 1 << 20
    num_cached_tokens: int = 0
    max_running: int | None = None
    """More calls at a time than this are answered busy."""
    plan: deque[Behaviour] = field(default_factory=deque)
    usual: Behaviour = field(default_factory=Behaviour)
    """Of calls for which nothing is on the plan."""
    calls: list[Call] = field(default_factory=list)
    num_requests: int = 0
    """What it says of itself: others' requests. Those of the gateway under test are the gateway's to count."""
    num_busy: int = 0
    num_infos: int = 0

    @property
    def num_running(self) -> int:
        return sum(call.ended == "running" for call in self.calls)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        if not auth.authorized(self.secret, authorization):
            await _answer(send, 401, b"no token")
        elif scope["path"] == "/v1/worker":
            self.num_infos += 1
            await _answer(send, 200, protocol.encode(self.info()))
        else:
            decode = protocol.decode_generate if scope["path"] == "/v1/generate" else protocol.decode_prefill
            await self._call(Call(scope["path"], decode(await _body(receive)), scope["headers"]), receive, send)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            role=self.role,
            incarnation=self.incarnation,
            state=self.state,
            model_name="stub",
            fingerprint=self.fingerprint,
            block_size=16,
            num_blocks=self.capacity_tokens // 16,
            capacity_tokens=self.capacity_tokens,
            num_free_blocks=self.capacity_tokens // 16,
            num_requests=self.num_requests,
        )

    async def _call(self, call: Call, receive: Any, send: Any) -> None:
        behaviour = self.plan.popleft() if self.plan else self.usual
        if behaviour.busy or (self.max_running is not None and self.num_running >= self.max_running):
            self.num_busy += 1
            await _answer(send, 200, protocol.encode_frame(Busy(message="full")))
            return
        self.calls.append(call)
        work = asyncio.create_task(self._stream(call, behaviour, send))
        gone = asyncio.create_task(_disconnected(receive))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, gone):
            task.cancel()
        await asyncio.wait({work, gone})
        if work.cancelled():
            call.ended = "cancelled"
        elif isinstance(work.exception(), _Break):
            call.ended = "broken"
            send.__self__.transport.abort()  # uvicorn's: what a killed process looks like from the other end
        else:
            work.result()

    async def _stream(self, call: Call, behaviour: Behaviour, send: Any) -> None:
        if behaviour.reset_before_answer:
            raise _Break
        if behaviour.hold_before_answer is not None:
            await behaviour.hold_before_answer.wait()
        if behaviour.status is not None:
            await _answer(send, behaviour.status, b'{"error": "as planned"}')
            call.ended = "finished"
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for frame in self._frames(call, behaviour):
            if call.num_tokens % 64 == 0:
                await asyncio.sleep(0)  # a write to a connection that is gone does not wait, and would starve the loop
            if not isinstance(frame, Reserved | Accepted | PromptLogprobs | Tokens):
                call.ended = "finished"
            await send({"type": "http.response.body", "body": protocol.encode_frame(frame), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(self, call: Call, behaviour: Behaviour) -> AsyncIterator[Frame]:
        if isinstance(call.request, PrefillRequest):
            async for frame in self._prefill(call, call.request, behaviour):
                yield frame
            return
        handoff = call.request.handoff
        if handoff is None or behaviour.accept:
            yield Accepted()
            for scores in _prompt_scores(call):
                yield scores
        else:
            yield Reserved(reservation=Reservation(fabric_address="stub:1", num_cached_tokens=self.num_cached_tokens))
            await self.fabric.committed(handoff.handoff_id).wait()
        async for frame in self._tokens(call, behaviour, limit=None):
            yield frame

    async def _prefill(self, call: Call, request: PrefillRequest, behaviour: Behaviour) -> AsyncIterator[Frame]:
        if behaviour.pause_scores is not None:
            await behaviour.pause_scores.wait()
        for scores in _prompt_scores(call):
            yield scores
        async for frame in self._tokens(call, behaviour, limit=1):
            yield frame
            if not isinstance(frame, Tokens):
                return
        await self._misbehave(call, behaviour)
        if request.handoff is not None:
            self.fabric.committed(request.handoff.handoff_id).set()
        stats = Stats(prefill_s=0.1, num_cached_tokens=self.num_cached_tokens, transfer_bytes=1000, lane="stub")
        yield Transferred(stats=stats)

    async def _tokens(self, call: Call, behaviour: Behaviour, limit: int | None) -> AsyncIterator[Frame]:
        """Token frames, then Finish if the output ends; with a limit, nothing after it unless it ends there."""
        sampling = call.request.work.sampling
        output = self.output_of_choice.get(sampling.choice, self.output)
        index = len(call.request.work.output_token_ids)
        while True:
            await self._misbehave(call, behaviour)
            if behaviour.fail_after is not None and call.num_tokens >= behaviour.fail_after[0]:
                yield behaviour.fail_after[1]
                return
            batch: list[int] = []
            ending = None
            while ending is None and len(batch) < behaviour.tokens_a_frame:
                batch.append(output[index + len(batch)] if index + len(batch) < len(output) else 2)
                ending = _ending(batch[-1], index + len(batch), sampling)
            logprobs = [_logprob(token_id, sampling.logprobs) for token_id in batch] if _scored(sampling) else []
            call.num_tokens += len(batch)
            yield Tokens(index=index, token_ids=batch, logprobs=logprobs)
            index += len(batch)
            if ending is not None:
                if behaviour.lose_finish:
                    raise _Break
                yield Finish(reason=ending, stats=Stats(num_cached_tokens=self.num_cached_tokens))
                return
            if limit is not None:
                return

    async def _misbehave(self, call: Call, behaviour: Behaviour) -> None:
        if behaviour.pause is not None:
            await behaviour.pause()
        if behaviour.hold_after is not None and call.num_tokens >= behaviour.hold_after[0]:
            await behaviour.hold_after[1].wait()
        if behaviour.cut_after is not None and call.num_tokens >= behaviour.cut_after:
            raise _Break


def _prompt_scores(call: Call) -> list[PromptLogprobs]:
    """Of all prompt tokens but the first, in two frames."""
    work = call.request.work
    num_top, prompt = work.sampling.prompt_logprobs, work.prompt_token_ids
    if num_top is None:
        return []
    half = max(1, len(prompt) // 2)
    parts = [(1, prompt[1:half]), (half, prompt[half:])] if half > 1 else [(1, prompt[1:])]
    return [PromptLogprobs(start=start, logprobs=[_logprob(i, num_top) for i in ids]) for start, ids in parts]


def _ending(token_id: int, num_tokens: int, sampling: protocol.Sampling) -> Literal["stop", "length"] | None:
    if token_id in sampling.stop_token_ids:
        return "stop"
    return "length" if num_tokens >= sampling.max_tokens else None


def _scored(sampling: protocol.Sampling) -> bool:
    return sampling.logprobs is not None


def _logprob(token_id: int, num_top: int | None) -> TokenLogprob:
    return TokenLogprob(
        logprob=-token_id / 100, top=[(token_id + i, -(token_id + i) / 100) for i in range(num_top or 0)]
    )


async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
