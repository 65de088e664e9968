"""One transfer at the sending side: gathers segments into staging memory and says what its machine wants said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from transport import messages, transfer
from transport import transfer_events as events
from transport.checksum import checksum
from transport.errors import TransferError, TransportError
from transport.link import Link
from transport.messages import Abort, Commit, Renew, Segment
from transport.staging import Buffer
from transport.transfer import TransferStats

if TYPE_CHECKING:
    from transport.sender import KvSender

logger = logging.getLogger(__name__)

Read = Callable[[int, int, Buffer], Awaitable[bool]]
"""(start, num_tokens, buffer): gather KV into the buffer. False: the request has ended. Returns or raises only when
nothing writes into the buffer any more, even if it was cancelled."""


class Shipment:
    """One transfer. `ship` as KV becomes readable, `commit` at the end; `abort` is idempotent and always allowed."""

    def __init__(self, sender: KvSender, peer: Link, handoff_id: bytes, machine: transfer.Sender, read: Read) -> None:
        self.machine = machine
        self._peer = peer
        self._sender = sender
        self._handoff_id = handoff_id
        self._read = read
        self._next = machine.start
        self._active_s = 0.0
        """Gathering and handing over segments so far; the waits for the next chunk are not in it."""
        self._num_bytes = 0
        self._outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None: acknowledged. Text: failed, and why."""
        self._work: asyncio.Queue[events.SendSegment | events.SendCommit] = asyncio.Queue()
        self.pump = asyncio.create_task(self._pump_all())

    async def ship(self, num_tokens: int) -> None:
        """KV of tokens [0, num_tokens) can be read now: ship what has not been. Returns before it is sent.
        Raises TransferError once the transfer has failed."""
        self._raise_if_failed()
        end = min(num_tokens, self.machine.end)
        for start, count in self._sender.layout.segments(self._next, end, self._sender.max_segment_bytes):
            self._work.put_nowait(events.SendSegment(start, count))
        self._next = max(self._next, end)

    async def commit(self, meta: bytes) -> TransferStats:
        """Send the rest, then the commit; returns when the receiver has acknowledged. Raises TransferError."""
        assert self._next == self.machine.end, "every token is shipped before the commit"
        if len(meta) > messages.MAX_META_BYTES:
            raise TransferError(f"{len(meta)} bytes beside the KV, the limit is {messages.MAX_META_BYTES}")
        active_s, asked_at = self._active_s, self._sender.clock()
        self._work.put_nowait(events.SendCommit(0, meta))
        reason = await asyncio.shield(self._outcome)
        if reason is not None:
            raise TransferError(reason)
        return TransferStats(
            num_bytes=self._num_bytes,
            seconds=active_s + self._sender.clock() - asked_at,
            num_segments=len(self.machine.segments),
            num_resent=self.machine.num_resent,
            lane=self._peer.lane,
        )

    async def abort(self, reason: str) -> None:
        """Ends it and tells the receiver; nothing after an acknowledgement or an earlier end."""
        self.handle(events.Ended(reason, tell=True))
        self.pump.cancel()

    def tick(self) -> None:
        self.handle(events.Tick())
        if not self.machine.ended:
            self._peer.say(Renew(self._handoff_id, self.machine.attempt))

    def handle(self, event: events.SenderEvent) -> None:
        was_ended = self.machine.ended
        for instruction in self.machine.handle(event, self._sender.clock()):
            match instruction:
                case events.SendSegment():
                    self._sender.counts["resent"] += 1
                    self._work.put_nowait(instruction)
                case events.SendCommit():
                    message = Commit(self._handoff_id, self.machine.attempt, instruction.digest, instruction.meta)
                    self._peer.say(message)
                case events.TellAbort():
                    reason = instruction.reason[: messages.MAX_REASON_CHARS]
                    self._peer.say(Abort(self._handoff_id, self.machine.attempt, reason))
                case events.Fail():
                    self._end("failed", instruction.reason)
                case events.Done():
                    self._end("acked", None)
        if self.machine.ended and not was_ended:
            self._sender.shipments.discard(self)
            self._peer.shipments.pop((self._handoff_id, self.machine.attempt), None)

    def _end(self, count: str, reason: str | None) -> None:
        self._sender.counts[count] += 1
        if not self._outcome.done():
            self._outcome.set_result(reason)
        if asyncio.current_task() is not self.pump:
            self.pump.cancel()

    def _raise_if_failed(self) -> None:
        if self._outcome.done() and (reason := self._outcome.result()) is not None:
            raise TransferError(reason)

    async def _pump_all(self) -> None:
        """Segments in order, the commit after them, resends as they are asked for."""
        try:
            while True:
                work = await self._work.get()
                if isinstance(work, events.SendSegment):
                    began = self._sender.clock()
                    await self._send_segment(work.start, work.num_tokens)
                    self._active_s += self._sender.clock() - began
                else:
                    self.handle(events.CommitAsked(work.meta))
        except TransportError as error:
            self.handle(events.Ended(str(error), tell=True))
        except Exception as error:  # `read` is the owner's: a fault in it must not leave the receiver waiting
            logger.exception("a shipment failed")
            self.handle(events.Ended(f"{type(error).__name__}: {error}", tell=True))

    async def _send_segment(self, start: int, num_tokens: int) -> None:
        num_bytes = num_tokens * self._sender.layout.bytes_per_token
        staged = await self._sender.staging.lend()
        try:
            payload = staged[:num_bytes]
            if not await self._read(start, num_tokens, payload):
                raise TransferError("the request has ended")
            began = self._sender.clock()
            check = checksum(payload)
            self._sender.counts["checksum_us"] += round((self._sender.clock() - began) * 1e6)
            if self.machine.ended:
                raise TransferError("the transfer has ended")
            if start not in self.machine.segments:
                self.machine.handle(events.Shipped(start, num_tokens, check), self._sender.clock())
            self._num_bytes += num_bytes
            message = Segment(self._handoff_id, self.machine.attempt, start, num_tokens, num_bytes, check)
            await self._peer.put(message, payload, staged)
        except BaseException:
            self._sender.staging.give_back(staged)
            raise
