"""POST /v1/prefill: one request's life on the prefill side.

    AddRequest(prefill_only) -> a chunk is computed -> its KV is shipped while the next one is computed
    -> first token: to the gateway at once, before the transfer ends
    -> commit (first token, output index) -> acknowledged -> Release -> Transferred frame
    -> or the first token ends the request: Finish frame, nothing is committed, decode lets go

The blocks are held until the receiver has acknowledged. Runs on the worker's event loop; the caller closing the
stream, the deadline and a failed transfer all end in `finally`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engine import messages
from engine.messages import (
    AddRequest,
    EngineFailed,
    Finished,
    KvComputed,
    PrefillDone,
    PromptScored,
    Refused,
    TokenOut,
)
from services.protocol import (
    Busy,
    Failure,
    Frame,
    Handoff,
    HandoffState,
    PrefillRequest,
    Reservation,
    Transferred,
)
from services.worker import handoff_key
from services.worker.convert import ended, engine_request, prompt_logprobs_frame, tokens_frame, wire_logprobs
from services.worker.engine_client import DeadlinePassed, EngineClient
from services.worker.shipping import hand_over, open_shipment, shipped_stats
from transport.errors import TransportError
from transport.sender import KvSender
from transport.shipment import Shipment

logger = logging.getLogger(__name__)


class PrefillService:
    """`max_queued` bounds the requests this worker has in hand, waiting ones included."""

    def __init__(
        self, engine: EngineClient, sender: KvSender, *, secret: str, incarnation: str, max_queued: int
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._secret = secret
        self._incarnation = incarnation
        self._max_queued = max_queued

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[Frame, None]:
        work = request.work
        if self._engine.num_open >= self._max_queued:
            yield Busy(message="the queue is full")
            return
        if (problem := self._refusal(request)) is not None:
            yield problem
            return
        events = self._engine.open(work.request_id, work.deadline_s)
        try:
            if request.handoff is not None and request.reservation is not None:
                frames = self._hand_off(request, request.handoff, request.reservation, events)
            else:
                frames = self._only_token(request, events)
            async with aclosing(frames):
                async for frame in frames:
                    yield frame
        except TransportError as error:
            yield Failure(message=str(error), kind="transfer")
        finally:
            self._engine.close(work.request_id)

    def _refusal(self, request: PrefillRequest) -> Failure | None:
        handoff, work = request.handoff, request.work
        if self._engine.is_open(work.request_id):
            return Failure(message="this request id is already in use", kind="invalid", param="request_id")
        if handoff is None:
            if work.sampling.max_tokens - len(work.output_token_ids) != 1:
                return Failure(message="more than one token needs a handoff", kind="invalid", param="handoff")
            return None
        if request.reservation is None:
            return Failure(message="a handoff needs a reservation", kind="invalid", param="reservation")
        return handoff_key.refusal(handoff, self._secret, self._incarnation, receives=False, now=time.time())

    async def _only_token(self, request: PrefillRequest, events: asyncio.Queue[Any]) -> AsyncGenerator[Frame, None]:
        """The whole answer is one token: nothing is held or shipped."""
        self._engine.submit(AddRequest(engine_request(request.work)))
        while True:
            event = await events.get()
            if isinstance(event, TokenOut):
                yield tokens_frame(event)
            elif isinstance(event, PromptScored):
                yield prompt_logprobs_frame(event)
            elif isinstance(event, Finished | Refused | EngineFailed | DeadlinePassed):
                yield ended(event)
                return

    async def _hand_off(
        self, request: PrefillRequest, handoff: Handoff, reservation: Reservation, events: asyncio.Queue[Any]
    ) -> AsyncGenerator[Frame, None]:
        work = engine_request(request.work, prefill_only=True)
        self._engine.submit(AddRequest(work))

        # Opened before the prompt is computed: connecting and the greeting cost nothing then, and the open
        # transfer keeps decode's reservation alive while this request is queued.
        shipment = await open_shipment(
            self._sender,
            self._engine,
            work.request_id,
            handoff,
            reservation,
            end=work.num_tokens,
            deadline_s=request.work.deadline_s,
        )
        ending = "prefill gave up"
        try:
            first: TokenOut | None = None
            while True:
                event = await events.get()
                match event:
                    case KvComputed() if event.num_tokens < work.num_tokens:
                        await shipment.ship(event.num_tokens)
                    case PromptScored():
                        yield prompt_logprobs_frame(event)
                    case TokenOut():
                        first, first_at = event, time.monotonic()
                        yield tokens_frame(event)
                    case PrefillDone():
                        assert first is not None, "a prefill is done once its first token is out"
                        yield await self._commit(shipment, work, first, event, first_at)
                        return
                    case Finished() | Refused() | EngineFailed() | DeadlinePassed():
                        ending = "the request ended before its transfer"
                        yield ended(event)
                        return
        finally:
            await shipment.abort(ending)

    async def _commit(
        self,
        shipment: Shipment,
        work: messages.EngineRequest,
        first: TokenOut,
        done: PrefillDone,
        first_at: float,
    ) -> Transferred:
        state = HandoffState(index=first.index, token_id=first.token_id, logprobs=wire_logprobs(first.logprobs))
        moved = await hand_over(shipment, work.num_tokens, state)
        self._engine.submit(messages.Release(work.request_id))
        return Transferred(stats=shipped_stats(done.stats, moved, waited_s=time.monotonic() - first_at))
