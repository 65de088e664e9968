"""The sending side: one connection a peer, shared by its shipments; one Sender machine a shipment.

Owned by a prefill worker's event loop. Gathering segment k + 1 overlaps the sending of segment k; both are bounded
by the staging pool. `commit` returns on the acknowledgement, which is the only proof of delivery.

A staging buffer has one owner at any time: the shipment while it is gathered, the peer from the moment its sends are
started until they have ended, whatever becomes of the shipment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np

from transport import messages, transfer
from transport.checksum import checksum
from transport.errors import ConnectFailed, ConnectionLost, PairingRefused, TransferError, TransportError, WireError
from transport.layout import KvLayout
from transport.messages import Abort, Ack, Alive, Commit, Control, Hello, HelloReply, Open, Renew, Resend, Segment
from transport.plane import Channel, Connection, Plane
from transport.staging import Buffer, StagingPool
from transport.transfer import TransferStats

logger = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
TICK_S = 0.5
SILENCE_S = 10.0
CLOSE_S = 2.0
MAX_PAYLOADS = 2
"""Payloads under way to a peer: the next is announced while one moves, and shipments take turns."""
MAX_STAGING_BYTES = 64 << 20

Read = Callable[[int, int, Buffer], Awaitable[bool]]
"""(start, num_tokens, buffer): gather KV into the buffer. False: the request has ended. Returns or raises only when
nothing writes into the buffer any more, even if it was cancelled."""


class KvSender:
    def __init__(
        self,
        plane: Plane,
        layout: KvLayout,
        hello: Hello,
        *,
        max_segment_bytes: int,
        max_staging_bytes: int = MAX_STAGING_BYTES,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plane = plane
        self.layout = layout
        self.hello = hello
        self.max_segment_bytes = max_segment_bytes
        self.clock = clock
        self.silence_s = silence_s
        self.staging = StagingPool(max(max_segment_bytes, layout.bytes_per_token), max_staging_bytes)
        self.counts = dict.fromkeys(("acked", "failed", "resent", "bytes", "connects"), 0)
        self.shipments: set[Shipment] = set()
        self._peers: dict[tuple[str, str], asyncio.Task[_Peer]] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def open(
        self,
        address: str,
        *,
        peer_incarnation: str,
        handoff_id: bytes,
        attempt: int,
        key: bytes,
        start: int,
        end: int,
        deadline_s: float,
        read: Read,
    ) -> Shipment:
        """Announce a transfer of tokens [start, end). Connects where there is no connection yet.
        Raises ConnectFailed, ConnectionLost, PairingRefused."""
        now = self.clock()
        try:
            async with asyncio.timeout(deadline_s):
                peer = await self._peer(address, peer_incarnation)
        except TimeoutError as error:
            raise ConnectFailed(f"no connection to {address} before the deadline") from error
        machine = transfer.Sender(
            start, end, attempt, deadline=now + deadline_s, silence_s=self.silence_s, heard_at=self.clock()
        )
        peer.expect_answers()
        shipment = Shipment(self, peer, handoff_id, machine, read)
        peer.shipments[handoff_id, attempt] = shipment
        self.shipments.add(shipment)
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
        peer.say(Open(handoff_id, attempt, key, start, end))
        return shipment

    async def close(self) -> None:
        """Tells the receivers. Bounded; nothing of this sender runs afterwards unless a `read` never returned."""
        pumps = [shipment.pump for shipment in self.shipments]
        for shipment in list(self.shipments):
            await shipment.abort("prefill stops")
        tasks = [*self._peers.values(), *pumps, *([self._ticker] if self._ticker else [])]
        for peer in [peer for task in self._peers.values() if (peer := _connected(task)) is not None]:
            await peer.close()
        self._peers.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    def snapshot(self) -> dict[str, object]:
        states = Counter(shipment.machine.state.value for shipment in self.shipments)
        return self.counts | {
            "open": len(self.shipments),
            "states": dict(states),
            "connections": len(self._peers),
            **self.staging.snapshot(),
        }

    async def _peer(self, address: str, incarnation: str) -> _Peer:
        """The connection to this incarnation. One that has ended is replaced; those to other incarnations at the
        address are dropped once this one has greeted us: it is the living one."""
        task = self._peers.get((address, incarnation))
        if task is None or (task.done() and ((known := _connected(task)) is None or known.closed)):
            task = self._connect(address, incarnation)
        peer = await asyncio.shield(task)
        for key, other in list(self._peers.items()):
            former = _connected(other)
            stale = key[0] == address and key[1] != incarnation
            if (stale and other.done()) or (former is not None and former.closed):
                del self._peers[key]
                if former is not None:
                    former.lose("another incarnation has taken its place")
        return peer

    def _connect(self, address: str, incarnation: str) -> asyncio.Task[_Peer]:
        """As a task that several openings wait for: one connection is made, and none of them can cancel it."""
        task = asyncio.create_task(self._greet(address, incarnation))
        self._peers[address, incarnation] = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _greet(self, address: str, incarnation: str) -> _Peer:
        connection = await self.plane.connect(address)
        self.counts["connects"] += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await _send(connection, self.hello)
                reply = await _recv(connection)
            if not isinstance(reply, HelloReply):
                raise WireError(f"a {type(reply).__name__} in answer to the hello")
            other = reply.hello.incarnation != incarnation
            difference = "incarnation" if other else self.hello.difference(reply.hello)
            if reply.refused or difference:
                raise PairingRefused(f"{address} is no pair of this worker: {reply.refused or f'{difference} differs'}")
            return _Peer(self, connection, await self.plane.lane(connection))
        except TimeoutError as error:
            connection.abort()
            raise ConnectFailed(f"{address} did not greet within {HELLO_TIMEOUT_S} s") from error
        except TransportError:
            connection.abort()
            raise

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for shipment in list(self.shipments):
                shipment.tick()
            for task in list(self._peers.values()):
                if (peer := _connected(task)) is not None:
                    peer.check_heard()


def _connected(task: asyncio.Task[_Peer]) -> _Peer | None:
    """What a finished attempt to connect has brought."""
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None


class _Peer:
    """One connection. Sends are started in order and end on their own; one task hears the answers."""

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
        return self._start(self._run(_send(self._connection, message)))

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
            shipment.handle(transfer.Ended(f"the connection to decode was lost: {reason}", tell=False))

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
            message = await _recv(self._connection)
            self._heard_at = self._sender.clock()
            if not isinstance(message, Ack | Alive | Resend | Abort):
                raise WireError(f"a {type(message).__name__} from a receiver")
            shipment = self.shipments.get((message.handoff_id, message.attempt))
            if shipment is None:
                continue
            match message:
                case Ack():
                    shipment.handle(transfer.Acked(message.attempt))
                case Alive():
                    shipment.handle(transfer.Renewed(message.attempt))
                case Resend():
                    shipment.handle(transfer.ResendAsked(message.attempt, message.start, message.num_tokens))
                case Abort():
                    shipment.handle(transfer.Ended(f"decode: {message.reason}", tell=False))


class Shipment:
    """One transfer. `ship` as KV becomes readable, `commit` at the end; `abort` is idempotent and always allowed."""

    def __init__(self, sender: KvSender, peer: _Peer, handoff_id: bytes, machine: transfer.Sender, read: Read) -> None:
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
        self._work: asyncio.Queue[transfer.SendSegment | transfer.SendCommit] = asyncio.Queue()
        self.pump = asyncio.create_task(self._pump_all())

    async def ship(self, num_tokens: int) -> None:
        """KV of tokens [0, num_tokens) can be read now: ship what has not been. Returns before it is sent.
        Raises TransferError once the transfer has failed."""
        self._raise_if_failed()
        end = min(num_tokens, self.machine.end)
        for start, count in self._sender.layout.segments(self._next, end, self._sender.max_segment_bytes):
            self._work.put_nowait(transfer.SendSegment(start, count))
        self._next = max(self._next, end)

    async def commit(self, meta: bytes) -> TransferStats:
        """Send the rest, then the commit; returns when the receiver has acknowledged. Raises TransferError."""
        assert self._next == self.machine.end, "every token is shipped before the commit"
        if len(meta) > messages.MAX_META_BYTES:
            raise TransferError(f"{len(meta)} bytes beside the KV, the limit is {messages.MAX_META_BYTES}")
        active_s, asked_at = self._active_s, self._sender.clock()
        self._work.put_nowait(transfer.SendCommit(0, meta))
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
        self.handle(transfer.Ended(reason, tell=True))
        self.pump.cancel()

    def tick(self) -> None:
        self.handle(transfer.Tick())
        if not self.machine.ended:
            self._peer.say(Renew(self._handoff_id, self.machine.attempt))

    def handle(self, event: transfer.SenderEvent) -> None:
        was_ended = self.machine.ended
        for instruction in self.machine.handle(event, self._sender.clock()):
            match instruction:
                case transfer.SendSegment():
                    self._sender.counts["resent"] += 1
                    self._work.put_nowait(instruction)
                case transfer.SendCommit():
                    message = Commit(self._handoff_id, self.machine.attempt, instruction.digest, instruction.meta)
                    self._peer.say(message)
                case transfer.TellAbort():
                    reason = instruction.reason[: messages.MAX_REASON_CHARS]
                    self._peer.say(Abort(self._handoff_id, self.machine.attempt, reason))
                case transfer.Fail():
                    self._end("failed", instruction.reason)
                case transfer.Done():
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
                if isinstance(work, transfer.SendSegment):
                    began = self._sender.clock()
                    await self._send_segment(work.start, work.num_tokens)
                    self._active_s += self._sender.clock() - began
                else:
                    self.handle(transfer.CommitAsked(work.meta))
        except TransportError as error:
            self.handle(transfer.Ended(str(error), tell=True))
        except Exception as error:  # `read` is the owner's: a fault in it must not leave the receiver waiting
            logger.exception("a shipment failed")
            self.handle(transfer.Ended(f"{type(error).__name__}: {error}", tell=True))

    async def _send_segment(self, start: int, num_tokens: int) -> None:
        num_bytes = num_tokens * self._sender.layout.bytes_per_token
        staged = await self._sender.staging.lend()
        try:
            payload = staged[:num_bytes]
            if not await self._read(start, num_tokens, payload):
                raise TransferError("the request has ended")
            check = checksum(payload)
            if self.machine.ended:
                raise TransferError("the transfer has ended")
            if start not in self.machine.segments:
                self.machine.handle(transfer.Shipped(start, num_tokens, check), self._sender.clock())
            self._num_bytes += num_bytes
            message = Segment(self._handoff_id, self.machine.attempt, start, num_tokens, num_bytes, check)
            await self._peer.put(message, payload, staged)
        except BaseException:
            self._sender.staging.give_back(staged)
            raise


async def _send(connection: Connection, message: Control) -> None:
    await connection.send(np.frombuffer(messages.encode(message), dtype=np.uint8), Channel.CONTROL)


async def _recv(connection: Connection) -> Control:
    buffer = np.zeros(messages.CONTROL_BYTES, dtype=np.uint8)
    await connection.recv(buffer, Channel.CONTROL)
    return messages.decode(buffer.data)
