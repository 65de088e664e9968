"""The receiving side: accepts peers, takes their segments into staging memory, runs one Receiver machine a handoff.

Owned by a decode worker's event loop. Bytes are verified before `sink.write` sees them; a payload for a handoff that
is unknown or over is received all the same, into staging memory, and dropped, so that the connection goes on.

Each peer has two tasks: one hears control messages and never waits for memory, so that renewals and aborts count while
payloads queue for it; the other is transport.payloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from transport import messages, transfer
from transport import transfer_events as events
from transport.checksum import checksum
from transport.control import recv_control, send_control
from transport.errors import ConnectionLost, TransportError, WireError
from transport.layout import KvLayout
from transport.messages import Abort, Ack, Alive, Commit, Control, Hello, HelloReply, Open, Renew, Resend, Segment
from transport.payloads import Payloads
from transport.plane import Connection, Plane
from transport.staging import Buffer, StagingPool
from transport.transfer import Grant, TransferStats, by_state

logger = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
TICK_S = 0.1
CLOSE_S = 2.0
KEPT_ENDED = 1024
"""Ended handoffs remembered, so that late messages are told from unknown ones and a lost Ack can be repeated."""

__all__ = ["Grant", "KvReceiver", "ReceiveSink"]


class ReceiveSink(Protocol):
    """Called on the event loop. Exactly one of `committed` and `failed`, unless the owner cancels first."""

    async def write(self, start: int, num_tokens: int, buffer: Buffer) -> bool: ...

    def committed(self, meta: bytes, stats: TransferStats) -> None: ...

    def failed(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Incoming:
    machine: transfer.Receiver
    sink: ReceiveSink | None
    """None once the owner has cancelled."""
    peer: _Peer | None = None
    staged: dict[int, tuple[Segment, Buffer, StagingPool]] = field(default_factory=dict)
    started_at: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class _Peer:
    connection: Connection
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    handoffs: set[bytes] = field(default_factory=set)
    lane: str = ""
    incarnation: str = ""
    has_opened: bool = False
    """It has shown the key of a handoff: until then it gets no memory that others need."""

    async def send(self, message: Control) -> None:
        async with self.lock:
            with contextlib.suppress(ConnectionLost):
                await send_control(self.connection, message)


class KvReceiver:
    def __init__(
        self,
        plane: Plane,
        layout: KvLayout,
        hello: Hello,
        *,
        max_segment_bytes: int,
        max_staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = ""
        self._closed = False
        self._plane = plane
        self._layout = layout
        self._hello = hello
        self._clock = clock
        segment_bytes = max(max_segment_bytes, layout.bytes_per_token)
        self._staging = StagingPool(segment_bytes, max_staging_bytes)
        self._for_strangers = StagingPool(segment_bytes, segment_bytes)
        """Where payloads land of whoever has opened nothing yet: a late sender's, or a stranger's."""
        self._open: dict[bytes, _Incoming] = {}
        self._ended: OrderedDict[bytes, _Incoming] = OrderedDict()
        self._peers: set[_Peer] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self._counts = dict.fromkeys(
            ("committed", "failed", "cancelled", "damaged", "unknown", "refused", "bytes", "checksum_us"), 0
        )
        self._num_late = 0
        """Of handoffs that are no longer remembered."""

    async def start(self) -> None:
        """Listen; `address` is what peers connect to afterwards. Raises FabricUnavailable."""
        self.address = await self._plane.listen(self._serve)
        self._ticker = asyncio.create_task(self._tick())

    def expect(self, grant: Grant, sink: ReceiveSink) -> None:
        """From now on a sender that shows the grant's key may ship its tokens."""
        assert grant.handoff_id not in self._open, "a handoff id is used once"
        now = self._clock()
        machine = transfer.Receiver(grant, deadline=now + grant.lease_s, since=now)
        self._open[grant.handoff_id] = _Incoming(machine, sink)

    def knows(self, handoff_id: bytes) -> bool:
        """Whether it was expected before, and is not forgotten yet."""
        return self._find(handoff_id) is not None

    def cancel(self, handoff_id: bytes) -> None:
        """The owner wants it no more: the sink is not called again, the sender is told. Unknown ids are ignored."""
        incoming = self._open.get(handoff_id)
        if incoming is not None:
            incoming.sink = None
            self._counts["cancelled"] += 1
            self._handle(incoming, events.Ended("decode gave the request up", tell=True))

    async def close(self) -> None:
        """Tells the senders. Bounded; a write that the owner has not answered by then is left to it."""
        for handoff_id in list(self._open):
            self.cancel(handoff_id)
        if self._ticker is not None:
            self._ticker.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_S / 4)
        for peer in list(self._peers):
            peer.connection.abort()
        rest = {*self._serving, *self._tasks, *([self._ticker] if self._ticker else [])}
        if rest:
            await asyncio.wait(rest, timeout=CLOSE_S)
        if self.address and not self._closed:
            await self._plane.stop_listening(self.address)
        self._closed = True

    def snapshot(self) -> dict[str, Any]:
        """Counters since the start, and what is open now: states with the age of the oldest in each."""
        machines = [incoming.machine for incoming in self._open.values()]
        return self._counts | {
            "open": len(self._open),
            "late": self._num_late + sum(i.machine.num_late for i in (*self._open.values(), *self._ended.values())),
            "states": by_state(machines, transfer.ReceiverState, self._clock()),
            "leases": [_lease(machine, self._clock()) for machine in machines],
            "connections": len(self._peers),
            **{name: value + self._for_strangers.snapshot()[name] for name, value in self._staging.snapshot().items()},
        }

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for incoming in list(self._open.values()):
                self._handle(incoming, events.Tick())

    # One peer

    async def _serve(self, connection: Connection) -> None:
        """A stranger that sends no valid hello in time, or anything else that is none of ours, loses its own
        connection and nothing more."""
        peer = _Peer(connection)
        self._peers.add(peer)
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        payloads = Payloads(
            connection,
            lambda: self._staging if peer.has_opened else self._for_strangers,
            partial(self._on_segment, peer),
            partial(self._on_commit, peer),
        )
        taking = asyncio.create_task(payloads.run())
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                accepted = await self._greet(peer)
            while accepted:
                await self._dispatch(peer, payloads, await recv_control(connection))
        except (TransportError, TimeoutError) as error:
            logger.info("a fabric connection ended: %s", error or type(error).__name__)
        finally:
            self._peers.discard(peer)
            connection.abort()
            for handoff_id in peer.handoffs:
                incoming = self._open.get(handoff_id)
                if incoming is not None and incoming.peer is peer:
                    self._handle(incoming, events.Ended("the connection to prefill was lost", tell=False))
            taking.cancel()
            await asyncio.wait({taking})  # it is bounded by what `settled` is
            self._serving.discard(serving)

    def _on_commit(self, peer: _Peer, message: Commit) -> None:
        incoming = self._find(message.handoff_id)
        if incoming is not None and incoming.peer is peer:
            self._handle(incoming, events.CommitArrived(message.attempt, message.digest, message.meta))

    async def _greet(self, peer: _Peer) -> bool:
        hello = await recv_control(peer.connection)
        if not isinstance(hello, Hello):
            raise WireError(f"a {type(hello).__name__} before the hello")
        peer.incarnation = hello.incarnation
        peer.lane = await self._plane.lane(peer.connection)
        difference = self._hello.difference(hello)
        refused = f"{difference} differs" if difference else ""
        # A stranger learns what differs, not what would not.
        ours = Hello(self._hello.incarnation, {}) if refused else self._hello
        await peer.send(HelloReply(ours, refused))
        if refused:
            self._counts["refused"] += 1
            logger.error("refused a prefill worker as a peer: %s", refused)
        return not refused

    async def _dispatch(self, peer: _Peer, payloads: Payloads, message: Control) -> None:
        if not isinstance(message, Open | Segment | Commit | Renew | Abort):
            raise WireError(f"a {type(message).__name__} from a sender")
        if isinstance(message, Segment):
            await payloads.announce(message)
            return
        incoming = self._find(message.handoff_id)
        if incoming is None:
            self._counts["unknown"] += 1
            if not isinstance(message, Abort | Renew):
                self._say(peer, Abort(message.handoff_id, message.attempt, "decode does not expect this handoff"))
            return
        match message:
            case Open():
                self._on_open(peer, incoming, message)
            case Commit():
                await payloads.announce(message)
            case Renew() if incoming.peer is peer:
                self._handle(incoming, events.Renewed(message.attempt))
            case Abort() if incoming.peer is peer and message.attempt == incoming.machine.grant.attempt:
                self._handle(incoming, events.Ended(f"prefill: {message.reason}", tell=False))

    def _on_open(self, peer: _Peer, incoming: _Incoming, message: Open) -> None:
        if incoming.peer not in (None, peer):
            self._refuse(peer, message, "another connection has opened this transfer")
            return
        former, incoming.peer = incoming.peer, peer
        opened = events.Opened(message.attempt, message.key, message.start, message.end, peer.incarnation)
        for instruction in self._handle(incoming, opened):
            assert isinstance(instruction, events.Refuse)
            incoming.peer = former
            self._refuse(peer, message, instruction.reason)
        if incoming.peer is peer and former is None:
            incoming.started_at = self._clock()
            peer.has_opened = True
            peer.handoffs.add(message.handoff_id)

    def _refuse(self, peer: _Peer, message: Open, reason: str) -> None:
        self._counts["refused"] += 1
        self._say(peer, Abort(message.handoff_id, message.attempt, reason[: messages.MAX_REASON_CHARS]))

    def _on_segment(self, peer: _Peer, segment: Segment, buffer: Buffer, staging: StagingPool) -> None:
        self._counts["bytes"] += segment.num_bytes
        incoming = self._find(segment.handoff_id)
        if incoming is None or incoming.peer is not peer:
            self._counts["unknown"] += 1
            staging.give_back(buffer)
            return
        began = self._clock()
        intact = segment.num_bytes == segment.num_tokens * self._layout.bytes_per_token and (
            checksum(buffer[: segment.num_bytes]) == segment.checksum
        )
        self._counts["checksum_us"] += round((self._clock() - began) * 1e6)
        if not intact:
            self._counts["damaged"] += 1
            logger.error("tokens from %d on arrived damaged from %s", segment.start, peer.connection.peer)
        incoming.num_bytes += segment.num_bytes
        incoming.staged[segment.start] = (segment, buffer, staging)
        arrived = events.SegmentArrived(segment.attempt, segment.start, segment.num_tokens, segment.checksum, intact)
        self._handle(incoming, arrived)
        if incoming.staged.pop(segment.start, None) is not None:  # no Write took it
            staging.give_back(buffer)

    # One handoff

    def _find(self, handoff_id: bytes) -> _Incoming | None:
        return self._open.get(handoff_id) or self._ended.get(handoff_id)

    def _handle(self, incoming: _Incoming, event: events.ReceiverEvent) -> list[events.Instruction]:
        """Does what the machine says; returns what only the caller can do."""
        left: list[events.Instruction] = []
        was_ended = incoming.machine.ended
        grant = incoming.machine.grant
        for instruction in incoming.machine.handle(event, self._clock()):
            match instruction:
                case events.Write():
                    self._spawn(self._write(incoming, *incoming.staged.pop(instruction.start)))
                case events.AskAgain():
                    self._say(
                        incoming.peer,
                        Resend(grant.handoff_id, grant.attempt, instruction.start, instruction.num_tokens),
                    )
                case events.Acknowledge():
                    self._say(incoming.peer, Ack(grant.handoff_id, grant.attempt))
                case events.SayAlive():
                    self._say(incoming.peer, Alive(grant.handoff_id, grant.attempt))
                case events.TellAbort():
                    reason = instruction.reason[: messages.MAX_REASON_CHARS]
                    self._say(incoming.peer, Abort(grant.handoff_id, grant.attempt, reason))
                case events.Deliver():
                    self._counts["committed"] += 1
                    if incoming.sink is not None:
                        incoming.sink.committed(instruction.meta, self._stats(incoming))
                case events.Fail():
                    self._counts["failed"] += incoming.sink is not None
                    if incoming.sink is not None:
                        incoming.sink.failed(instruction.reason)
                case _:
                    left.append(instruction)
        if incoming.machine.ended and not was_ended:
            self._retire_handoff(grant.handoff_id)
        return left

    def _retire_handoff(self, handoff_id: bytes) -> None:
        incoming = self._open.pop(handoff_id)
        incoming.sink = None
        self._ended[handoff_id] = incoming
        while len(self._ended) > KEPT_ENDED:
            _, oldest = self._ended.popitem(last=False)
            self._num_late += oldest.machine.num_late
            if oldest.peer is not None:
                oldest.peer.handoffs.discard(oldest.machine.grant.handoff_id)

    async def _write(self, incoming: _Incoming, segment: Segment, buffer: Buffer, staging: StagingPool) -> None:
        written = False
        try:
            if incoming.sink is not None:
                written = await incoming.sink.write(segment.start, segment.num_tokens, buffer[: segment.num_bytes])
        except Exception:  # the sink is the owner's: a fault in it ends the transfer and nothing more
            logger.exception("a segment could not be written")
        finally:
            staging.give_back(buffer)
        self._handle(incoming, events.SegmentWritten(segment.start, written))

    def _stats(self, incoming: _Incoming) -> TransferStats:
        return TransferStats(
            num_bytes=incoming.num_bytes,
            seconds=self._clock() - incoming.started_at,
            num_segments=len(incoming.machine.segments),
            num_resent=incoming.machine.num_resends,
            lane=incoming.peer.lane if incoming.peer else "",
        )

    def _say(self, peer: _Peer | None, message: Control) -> None:
        if peer is not None:
            self._spawn(peer.send(message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _lease(machine: transfer.Receiver, now: float) -> dict[str, str | int | float]:
    grant = machine.grant
    return {
        "handoff_id": grant.handoff_id.hex(),
        "attempt": grant.attempt,
        "state": machine.state.value,
        "left_s": round(machine.deadline - now, 3),
    }
