"""Requests that leave a decode worker alive, KV and all, because it is being stopped.

    Leaving frame -> POST /v1/hold: tokens stop, blocks stay -> reserved elsewhere -> POST /v1/ship: KV of every
    token but the last, which travels in the commit -> acknowledged -> released here, the stream ends
                     POST /v1/hold (resume): it goes on here after all

The stream of the request stays open all the while: closing it ends the request, held or not. On the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

from engine import messages
from services.protocol import Failure, Frame, HandoffState, Held, HoldRequest, Leaving, ShipRequest, Transferred, Work
from services.worker import handoff_key
from services.worker.engine_client import EngineClient
from services.worker.shipping import hand_over, open_shipment, shipped_stats
from transport.errors import TransportError
from transport.sender import KvSender

HOLD_S = 5.0
"""An engine that has not answered by then is in a step far longer than any it should make."""


@dataclass(slots=True)
class Stream:
    """An open POST /v1/generate."""

    work: Work
    events: asyncio.Queue[Any]
    last: tuple[int, int] | None = None
    """Output index and id of the token sent last."""
    leaving: bool = False
    expecting: bool = False
    """Its handoff is the receiver's to end with it."""
    held: messages.Held | None = None
    hold: asyncio.Future[messages.Held] | None = None
    """Somebody waits to have it held."""

    def sent(self, index: int, token_id: int) -> None:
        self.last = index, token_id
        self.held = None

    def answer_hold(self, event: messages.Held) -> bool:
        """Every token before it has been sent. False: it is held, and nobody waits for that any more."""
        waiting = self.hold is not None and not self.hold.done()
        self.held = event if event.ok and waiting else None
        if self.hold is not None and waiting:
            self.hold.set_result(event)
        return waiting or not event.ok

    def close(self) -> None:
        """Whoever waits to have it held learns that it has ended."""
        self.answer_hold(messages.Held(self.work.request_id, ok=False))


class Departure:
    def __init__(
        self, engine: EngineClient, sender: KvSender, streams: Mapping[str, Stream], *, secret: str, incarnation: str
    ) -> None:
        self._engine = engine
        self._sender = sender
        self._streams = streams
        self._secret = secret
        self._incarnation = incarnation
        self.announced = False

    def announce(self) -> None:
        """To every stream that is open, and to those that were let in just before."""
        self.announced = True
        for stream in self._streams.values():
            stream.leaving = True
            stream.events.put_nowait(Leaving())

    async def hold(self, request: HoldRequest) -> Frame:
        stream = self._streams.get(request.request_id)
        if stream is None:
            return _unknown(request.request_id)
        if request.resume:
            stream.held = None
            self._engine.submit(messages.Resume(request.request_id))
            return Held(num_output_tokens=len(stream.work.output_token_ids))
        held = stream.held or await self._hold(request.request_id, stream)
        if held is None:
            return Failure(message="the request could not be held in time", kind="unavailable")
        if not held.ok or stream.last is None:
            return Failure(message="the request does not decode now", kind="unavailable")
        return Held(num_output_tokens=stream.last[0] + 1)

    async def _hold(self, request_id: str, stream: Stream) -> messages.Held | None:
        """Asked twice at once, both get the one answer. One that comes too late is undone: see Stream.answer_hold."""
        if stream.hold is None or stream.hold.done():
            stream.hold = asyncio.get_running_loop().create_future()
            self._engine.submit(messages.Hold(request_id))
        waiting = stream.hold
        await asyncio.wait({waiting}, timeout=HOLD_S)
        if not waiting.done():
            waiting.cancel()
        return None if waiting.cancelled() else waiting.result()

    async def ship(self, request: ShipRequest) -> AsyncGenerator[Frame, None]:
        stream = self._streams.get(request.request_id)
        if stream is None or stream.held is None or stream.last is None:
            yield _unknown(request.request_id)
            return
        problem = handoff_key.refusal(request.handoff, self._secret, self._incarnation, receives=False, now=time.time())
        if problem is not None:
            yield problem
            return
        try:
            yield await self._ship(request, stream.held.num_tokens, stream.last)
        except TransportError as error:
            yield Failure(message=str(error), kind="transfer")

    async def _ship(self, request: ShipRequest, num_tokens: int, last: tuple[int, int]) -> Transferred:
        began = time.monotonic()
        shipment = await open_shipment(
            self._sender,
            self._engine,
            request.request_id,
            request.handoff,
            request.reservation,
            end=num_tokens,
            deadline_s=request.deadline_s,
        )
        try:
            moved = await hand_over(shipment, num_tokens, HandoffState(index=last[0], token_id=last[1]))
        finally:
            await shipment.abort("decode gave up handing the request on")
        self._engine.submit(messages.Release(request.request_id))
        return Transferred(stats=shipped_stats(messages.RequestStats(), moved, waited_s=time.monotonic() - began))


def _unknown(request_id: str) -> Failure:
    return Failure(message=f"no stream {request_id} is held here", kind="unavailable", param="request_id")
