"""POST /v1/generate: one request's life on the decode side.

    with a handoff     Reserve -> Reserved frame -> segments, each verified, into blocks -> commit
                               -> StartDecode -> tokens
                               -> Busy frame: no room, nothing is kept
    without            Accepted frame -> AddRequest -> tokens
    with a handoff whose uncached part is short: as without

Runs on the worker's event loop. The caller closing the stream, the deadline and a failed transfer all end in
`finally`, which tells the fabric and the engine; each ignores what it does not know or has already ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engine import messages
from engine.messages import AddRequest, Buffer, EngineFailed, Finished, PromptScored, Refused, StartDecode, TokenOut
from services.decode.departure import Departure, Stream
from services.protocol import (
    Accepted,
    Busy,
    Failure,
    Frame,
    GenerateRequest,
    Handoff,
    HandoffState,
    Leaving,
    ProtocolError,
    Reservation,
    Reserved,
    Tokens,
    decode_handoff_state,
)
from services.worker import handoff_key
from services.worker.convert import ended, engine_request, prompt_logprobs_frame, tokens_frame
from services.worker.engine_client import DeadlinePassed, EngineClient
from transport.receiver import Grant, KvReceiver
from transport.sender import KvSender
from transport.transfer import TransferStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Committed:
    """All KV of the request is in its blocks."""

    state: HandoffState


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """The transfer will not complete."""

    reason: str


class DecodeService:
    """`max_queued` bounds the requests this worker has in hand, waiting ones included."""

    def __init__(
        self,
        engine: EngineClient,
        receiver: KvReceiver,
        sender: KvSender,
        *,
        secret: str,
        incarnation: str,
        max_queued: int,
    ) -> None:
        self._engine = engine
        self._receiver = receiver
        self._secret = secret
        self._incarnation = incarnation
        self._max_queued = max_queued
        self._streams: dict[str, Stream] = {}
        self.departure = Departure(engine, sender, self._streams, secret=secret, incarnation=incarnation)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Frame, None]:
        request_id = request.work.request_id
        if self._engine.num_open >= self._max_queued:
            yield Busy(message="the queue is full")
            return
        if (problem := self._refusal(request)) is not None:
            yield problem
            return
        events = self._engine.open(request_id, request.work.deadline_s)
        stream = self._streams[request_id] = Stream(request.work, events, leaving=self.departure.announced)
        try:
            async with aclosing(self._frames(request, stream)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            self._streams.pop(request_id).close()
            if request.handoff is not None and stream.expecting:
                self._receiver.cancel(request.handoff.handoff_id)
            self._engine.close(request_id)

    def _refusal(self, request: GenerateRequest) -> Failure | None:
        handoff = request.handoff
        if self._engine.is_open(request.work.request_id):
            return Failure(message="this request id is already in use", kind="invalid", param="request_id")
        if handoff is None:
            return None
        if self._receiver.knows(handoff.handoff_id):
            return Failure(message="this handoff id has been used", kind="invalid", param="handoff")
        return handoff_key.refusal(handoff, self._secret, self._incarnation, receives=True, now=time.time())

    async def _frames(self, request: GenerateRequest, stream: Stream) -> AsyncGenerator[Frame, None]:
        events = stream.events
        if request.handoff is None:
            self._engine.submit(AddRequest(engine_request(request.work)))
            yield Accepted()
        else:
            frame = await self._reserve(request, request.handoff, stream)
            yield frame
            if not isinstance(frame, Accepted | Reserved):
                return
        if stream.leaving:
            yield Leaving()
        while True:
            event = await events.get()
            match event:
                case TokenOut():
                    stream.sent(event.index, event.token_id)
                    yield tokens_frame(event)
                case PromptScored():
                    yield prompt_logprobs_frame(event)
                case Committed():
                    stream.sent(event.state.index, event.state.token_id)
                    yield _first_token(event.state)
                    self._engine.submit(StartDecode(request.work.request_id, event.state.token_id))
                case Leaving():
                    yield event
                case messages.Held():
                    if not stream.answer_hold(event):
                        self._engine.submit(messages.Resume(request.work.request_id))
                case messages.Released():
                    return  # its KV is elsewhere, and so is the rest of the answer
                case TransferEnded():
                    yield Failure(message=event.reason, kind="transfer")
                    return
                case Finished() | Refused() | EngineFailed() | DeadlinePassed():
                    yield ended(event)
                    return

    async def _reserve(self, request: GenerateRequest, handoff: Handoff, stream: Stream) -> Frame:
        events = stream.events
        work = engine_request(request.work)
        self._engine.submit(messages.Reserve(work))
        event = await _answer(events)
        if not isinstance(event, messages.Reserved):
            return ended(event)
        if work.num_tokens - event.num_cached_tokens <= request.local_prefill_max_tokens:
            return await self._compute_here(work, events)
        sink = _Sink(self._engine, work.request_id, len(work.output_token_ids), events)
        stream.expecting = True
        self._receiver.expect(
            Grant(
                handoff_id=handoff.handoff_id,
                attempt=handoff.attempt,
                key=handoff.key,
                start=event.num_cached_tokens,
                end=work.num_tokens,
                lease_s=handoff.lease_s,
                sender=handoff.prefill_incarnation,
            ),
            sink,
        )
        return Reserved(
            reservation=Reservation(fabric_address=self._receiver.address, num_cached_tokens=event.num_cached_tokens)
        )

    async def _compute_here(self, work: messages.EngineRequest, events: asyncio.Queue[Any]) -> Frame:
        """In place of a reservation that there is."""
        self._engine.submit(messages.Abort(work.request_id))
        while not isinstance(event := await _answer(events), Finished | EngineFailed | DeadlinePassed):
            pass
        if not isinstance(event, Finished):
            return ended(event)
        self._engine.submit(AddRequest(work))
        return Accepted()


async def _answer(events: asyncio.Queue[Any]) -> Any:
    """The next event that is not Leaving, which `Stream.leaving` remembers."""
    while isinstance(event := await events.get(), Leaving):
        pass
    return event


class _Sink:
    """Where the fabric hands over one request's KV. Called on the event loop."""

    def __init__(self, engine: EngineClient, request_id: str, index: int, events: asyncio.Queue[Any]) -> None:
        self._engine = engine
        self._request_id = request_id
        self._index = index
        self._events = events

    async def write(self, start: int, num_tokens: int, buffer: Buffer) -> bool:
        return await self._engine.write_kv(self._request_id, start, num_tokens, buffer)

    def committed(self, meta: bytes, stats: TransferStats) -> None:
        try:
            state = decode_handoff_state(meta)
        except ProtocolError as error:
            self.failed(f"the commit carries no handoff state: {error}")
            return
        if state.index != self._index:
            self.failed(f"the commit is for output token {state.index}, expected {self._index}")
            return
        self._events.put_nowait(Committed(state))

    def failed(self, reason: str) -> None:
        self._events.put_nowait(TransferEnded(reason))


def _first_token(state: HandoffState) -> Tokens:
    return Tokens(index=state.index, token_ids=[state.token_id], logprobs=state.logprobs)
