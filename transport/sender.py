"""The sending side: one connection a peer, shared by its shipments; one Sender machine a shipment.

Owned by a prefill worker's event loop. Gathering segment k + 1 overlaps the sending of segment k; both are bounded
by the staging pool. `commit` returns on the acknowledgement, which is the only proof of delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport import messages, transfer
from transport.checksum import checksum
from transport.errors import ConnectFailed, ConnectionLost, PairingRefused, TransferError, TransportError, WireError
from transport.layout import KvLayout
from transport.messages import Abort, Ack, Commit, Control, Hello, HelloReply, Open, Renew, Resend, Segment
from transport.plane import Channel, Connection, Plane
from transport.staging import Buffer, StagingPool
from transport.transfer import TransferStats

logger = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
TICK_S = 0.5
MAX_QUEUED_SENDS = 2
"""Messages a peer's queue holds: enough to keep the fabric busy, few enough that shipments take turns."""
MAX_STAGING_BYTES = 64 << 20

Read = Callable[[int, int, Buffer], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class _Outgoing:
    message: Control
    payload: Buffer | None = None
    staged: Buffer | None = None


class KvSender:
    def __init__(
        self,
        plane: Plane,
        layout: KvLayout,
        hello: Hello,
        *,
        max_segment_bytes: int,
        max_staging_bytes: int = MAX_STAGING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plane = plane
        self.layout = layout
        self.hello = hello
        self.max_segment_bytes = max_segment_bytes
        self.clock = clock
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
        peer = await self._peer(address, peer_incarnation)
        machine = transfer.Sender(start, end, attempt, deadline=self.clock() + deadline_s)
        shipment = Shipment(self, peer, handoff_id, machine, read)
        peer.shipments[handoff_id, attempt] = shipment
        self.shipments.add(shipment)
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
        try:
            await peer.put(_Outgoing(Open(handoff_id, attempt, key, start, end)))
        except BaseException:
            await shipment.abort("not opened")
            raise
        return shipment

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for shipment in list(self.shipments):
            await shipment.abort("prefill stops")
        for task in self._peers.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().close()
            else:
                task.cancel()
        self._peers.clear()

    def snapshot(self) -> dict[str, object]:
        states: dict[str, int] = {}
        for shipment in self.shipments:
            name = shipment.machine.state.value
            states[name] = states.get(name, 0) + 1
        return self.counts | {
            "open": len(self.shipments),
            "states": states,
            "connections": len(self._peers),
            "staging_bytes": self.staging.num_lent * self.staging.buffer_bytes,
            "quarantined_bytes": self.staging.num_quarantined * self.staging.buffer_bytes,
        }

    async def _peer(self, address: str, incarnation: str) -> _Peer:
        """The connection to this incarnation: those to earlier ones at the address are dropped."""
        for key, task in list(self._peers.items()):
            stale = key[0] == address and key[1] != incarnation
            dead = task.done() and (task.cancelled() or task.exception() is not None or task.result().closed)
            if stale or dead:
                del self._peers[key]
                if task.done() and not task.cancelled() and task.exception() is None:
                    await task.result().close()
        task = self._peers.get((address, incarnation)) or self._connect(address, incarnation)
        return await asyncio.shield(task)

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
            difference = "incarnation" if reply.hello.incarnation != incarnation else self.hello.difference(reply.hello)
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


class _Peer:
    """One connection: a task that sends what is queued, in order, and a task that hears the answers."""

    def __init__(self, sender: KvSender, connection: Connection, lane: str) -> None:
        self.lane = lane
        self.shipments: dict[tuple[bytes, int], Shipment] = {}
        self._sender = sender
        self._connection = connection
        self._queue: asyncio.Queue[_Outgoing] = asyncio.Queue(MAX_QUEUED_SENDS)
        self._tasks = [asyncio.create_task(self._run(self._send_all())), asyncio.create_task(self._run(self._hear()))]
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def closed(self) -> bool:
        return self._lost.done() or self._connection.closed

    async def put(self, outgoing: _Outgoing) -> None:
        """Queue a message; waits while the queue is full. Raises ConnectionLost."""
        if self._lost.done():
            raise ConnectionLost(self._lost.result())
        putting: asyncio.Future[Any] = asyncio.ensure_future(self._queue.put(outgoing))
        lost: asyncio.Future[Any] = self._lost
        try:
            await asyncio.wait({putting, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not putting.done():
                raise ConnectionLost(self._lost.result())
        finally:
            putting.cancel()

    async def close(self) -> None:
        self._lose("closed")
        for task in self._tasks:
            task.cancel()
        await self._connection.settled()

    async def _run(self, work: Awaitable[None]) -> None:
        try:
            await work
        except TransportError as error:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_result(reason)
        self._connection.abort()
        for shipment in list(self.shipments.values()):
            shipment.handle(transfer.Ended(f"the connection to decode was lost: {reason}", tell=False))

    async def _send_all(self) -> None:
        while True:
            outgoing = await self._queue.get()
            await _send(self._connection, outgoing.message)
            if outgoing.payload is not None:
                await self._connection.send(outgoing.payload, Channel.PAYLOAD)
                self._sender.counts["bytes"] += len(outgoing.payload)
            if outgoing.staged is not None:
                await self._sender.staging.give_back(outgoing.staged)

    async def _hear(self) -> None:
        while True:
            message = await _recv(self._connection)
            if not isinstance(message, Ack | Resend | Abort):
                raise WireError(f"a {type(message).__name__} from a receiver")
            shipment = self.shipments.get((message.handoff_id, message.attempt))
            if shipment is None:
                continue
            match message:
                case Ack():
                    shipment.handle(transfer.Acked(message.attempt))
                case Resend():
                    shipment.handle(transfer.ResendAsked(message.attempt, message.start, message.num_tokens))
                case Abort():
                    shipment.handle(transfer.Ended(f"decode: {message.reason}", tell=False))


class Shipment:
    """One transfer. `ship` as KV becomes readable, `commit` at the end; `abort` is idempotent and always allowed."""

    def __init__(self, sender: KvSender, peer: _Peer, handoff_id: bytes, machine: transfer.Sender, read: Read) -> None:
        self.machine = machine
        self._sender = sender
        self._peer = peer
        self._handoff_id = handoff_id
        self._read = read
        self._next = machine.start
        self._started_at: float | None = None
        self._num_bytes = 0
        self._outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """None: acknowledged. Text: failed, and why."""
        self._work: asyncio.Queue[transfer.SendSegment | transfer.SendCommit] = asyncio.Queue()
        self._pump = asyncio.create_task(self._pump_all())

    async def ship(self, num_tokens: int) -> None:
        """KV of tokens [0, num_tokens) can be read now: ship what has not been. Returns before it is sent.
        Raises TransferError once the transfer has failed."""
        self._raise_if_failed()
        end = min(num_tokens, self.machine.end)
        if self._started_at is None:
            self._started_at = self._sender.clock()
        for start, count in self._sender.layout.segments(self._next, end, self._sender.max_segment_bytes):
            self._work.put_nowait(transfer.SendSegment(start, count))
        self._next = max(self._next, end)

    async def commit(self, meta: bytes) -> TransferStats:
        """Send the rest, then the commit; returns when the receiver has acknowledged. Raises TransferError."""
        assert self._next == self.machine.end, "every token is shipped before the commit"
        if len(meta) > messages.MAX_META_BYTES:
            raise TransferError(f"{len(meta)} bytes beside the KV, the limit is {messages.MAX_META_BYTES}")
        self._work.put_nowait(transfer.SendCommit(0, meta))
        reason = await asyncio.shield(self._outcome)
        if reason is not None:
            raise TransferError(reason)
        started = self._started_at if self._started_at is not None else self._sender.clock()
        return TransferStats(
            num_bytes=self._num_bytes,
            seconds=self._sender.clock() - started,
            num_segments=len(self.machine.segments),
            num_resent=self.machine.num_resent,
            lane=self._peer.lane,
        )

    async def abort(self, reason: str) -> None:
        """Ends it and tells the receiver; nothing after an acknowledgement or an earlier end."""
        self.handle(transfer.Ended(reason, tell=True))
        self._pump.cancel()

    def tick(self) -> None:
        self.handle(transfer.Tick())
        if not self.machine.ended:
            self._tell(Renew(self._handoff_id, self.machine.attempt))

    def handle(self, event: transfer.SenderEvent) -> None:
        was_ended = self.machine.ended
        for instruction in self.machine.handle(event, self._sender.clock()):
            match instruction:
                case transfer.SendSegment():
                    self._sender.counts["resent"] += 1
                    self._work.put_nowait(instruction)
                case transfer.TellAbort():
                    reason = instruction.reason[: messages.MAX_REASON_CHARS]
                    self._tell(Abort(self._handoff_id, self.machine.attempt, reason))
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
        if asyncio.current_task() is not self._pump:
            self._pump.cancel()

    def _raise_if_failed(self) -> None:
        if self._outcome.done() and (reason := self._outcome.result()) is not None:
            raise TransferError(reason)

    def _tell(self, message: Control) -> None:
        task = asyncio.ensure_future(self._peer.put(_Outgoing(message)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _pump_all(self) -> None:
        """Segments in order, the commit after them, resends as they are asked for."""
        try:
            while True:
                work = await self._work.get()
                if isinstance(work, transfer.SendSegment):
                    await self._send_segment(work.start, work.num_tokens)
                else:
                    for instruction in self.machine.handle(transfer.CommitAsked(work.meta), self._sender.clock()):
                        assert isinstance(instruction, transfer.SendCommit)
                        message = Commit(self._handoff_id, self.machine.attempt, instruction.digest, instruction.meta)
                        await self._peer.put(_Outgoing(message))
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
            await self._peer.put(_Outgoing(message, payload, staged))
        except BaseException:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._sender.staging.give_back(staged))
            raise


async def _send(connection: Connection, message: Control) -> None:
    await connection.send(np.frombuffer(messages.encode(message), dtype=np.uint8), Channel.CONTROL)


async def _recv(connection: Connection) -> Control:
    buffer = np.zeros(messages.CONTROL_BYTES, dtype=np.uint8)
    await connection.recv(buffer, Channel.CONTROL)
    return messages.decode(buffer.data)
