"""The sending side of one connection to a receiver, shared by the shipments that go there.

Sends are started in order and end on their own; one task hears the answers. A staging buffer is the link's from the
moment its sends are started until they have ended, whatever becomes of the shipment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any

from transport import transfer_events as events
from transport.control import recv_control, send_control
from transport.errors import ConnectionLost, TransportError, WireError
from transport.messages import Abort, Ack, Alive, Control, Resend, Segment
from transport.plane import Channel, Connection
from transport.staging import Buffer

if TYPE_CHECKING:
    from transport.sender import KvSender
    from transport.shipment import Shipment

TICK_S = 0.5
CLOSE_S = 2.0
MAX_PAYLOADS = 2
"""Payloads under way to a peer: the next is announced while one moves, and shipments take turns."""


class Link:
    def __init__(self, sender: KvSender, connection: Connection, lane: str) -> None:
        self.lane = lane
        self.shipments: dict[tuple[bytes, int], Shipment] = {}
        self._sender = sender
        self._connection = connection
        self._heard_at = sender.clock()
        self._lost: str | None = None
        self._room = asyncio.Semaphore(MAX_PAYLOADS)
        self._sends: set[asyncio.Task[None]] = set()
        self._hearing = asyncio.create_task(self._run(self._hear()))

    @property
    def closed(self) -> bool:
        return self._lost is not None or self._connection.closed

    async def put(self, message: Segment, payload: Buffer, staged: Buffer) -> None:
        """Start sending a segment; waits while MAX_PAYLOADS are under way. From then on `staged` is the peer's, who
        gives it back; when this raises (ConnectionLost, or the wait was cancelled) it is still the caller's."""
        await self._room.acquire()
        if self._lost is not None:
            self._room.release()
            raise ConnectionLost(self._lost)
        header = self.say(message)
        body = self._start(self._run(self._connection.send(payload, Channel.PAYLOAD)))
        self._start(self._finish(header, body, len(payload), staged))

    def say(self, message: Control) -> asyncio.Task[None]:
        return self._start(self._run(send_control(self._connection, message)))

    def expect_answers(self) -> None:
        """The peer has had nothing to answer for as long as the connection was idle."""
        if not self.shipments and not self._sends:
            self._heard_at = self._sender.clock()

    def check_heard(self) -> None:
        """The fabric notices a peer that has died at once, but one that hangs late or never. Sends that outlive
        their shipment count too: their buffers come back only when the connection ends."""
        waiting = bool(self.shipments or self._sends) and self._lost is None
        if waiting and self._sender.clock() >= self._heard_at + self._sender.silence_s + TICK_S:
            self.lose("the peer is silent")

    async def close(self) -> None:
        """What has been said gets a moment to leave."""
        if self._sends:
            await asyncio.wait(set(self._sends), timeout=CLOSE_S / 4)
        self.lose("closed")
        await asyncio.wait({self._hearing, *self._sends}, timeout=CLOSE_S)

    def lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        self._connection.abort()
        for shipment in list(self.shipments.values()):
            shipment.handle(events.Ended(f"the connection to decode was lost: {reason}", tell=False))

    async def _run(self, work: Awaitable[None]) -> None:
        try:
            await work
        except TransportError as error:
            self.lose(str(error))

    async def _finish(
        self, header: asyncio.Task[None], body: asyncio.Task[None], num_bytes: int, staged: Buffer
    ) -> None:
        await asyncio.wait({header, body})
        self._sender.counts["bytes"] += num_bytes
        self._sender.staging.give_back(staged)
        self._room.release()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)
        return task

    async def _hear(self) -> None:
        while True:
            message = await recv_control(self._connection)
            self._heard_at = self._sender.clock()
            if not isinstance(message, Ack | Alive | Resend | Abort):
                raise WireError(f"a {type(message).__name__} from a receiver")
            shipment = self.shipments.get((message.handoff_id, message.attempt))
            if shipment is None:
                continue
            match message:
                case Ack():
                    shipment.handle(events.Acked(message.attempt))
                case Alive():
                    shipment.handle(events.Renewed(message.attempt))
                case Resend():
                    shipment.handle(events.ResendAsked(message.attempt, message.start, message.num_tokens))
                case Abort():
                    shipment.handle(events.Ended(f"decode: {message.reason}", tell=False))
