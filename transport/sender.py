"""The sending side: one connection a peer, shared by its shipments; one Sender machine a shipment.

Owned by a prefill worker's event loop. Gathering segment k + 1 overlaps the sending of segment k; both are bounded
by the staging pool. `commit` returns on the acknowledgement, which is the only proof of delivery.

A staging buffer has one owner at any time: the shipment while it is gathered, the link from the moment its sends are
started until they have ended, whatever becomes of the shipment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from transport import transfer
from transport.control import recv_control, send_control
from transport.errors import ConnectFailed, PairingRefused, TransportError, WireError
from transport.layout import KvLayout
from transport.link import CLOSE_S, TICK_S, Link
from transport.messages import Hello, HelloReply, Open
from transport.plane import Plane
from transport.shipment import Read, Shipment
from transport.staging import StagingPool
from transport.transfer import by_state

logger = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 5.0
SILENCE_S = 10.0
MAX_STAGING_BYTES = 64 << 20


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
        self.counts = dict.fromkeys(("acked", "failed", "resent", "bytes", "connects", "checksum_us"), 0)
        self.shipments: set[Shipment] = set()
        self._peers: dict[tuple[str, str], asyncio.Task[Link]] = {}
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
            start, end, attempt, deadline=now + deadline_s, silence_s=self.silence_s, heard_at=self.clock(), since=now
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

    def snapshot(self) -> dict[str, Any]:
        """Counters since the start, and what is open now: states with the age of the oldest in each."""
        machines = [shipment.machine for shipment in self.shipments]
        return self.counts | {
            "open": len(self.shipments),
            "states": by_state(machines, transfer.SenderState, self.clock()),
            "connections": len(self._peers),
            **self.staging.snapshot(),
        }

    async def _peer(self, address: str, incarnation: str) -> Link:
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

    def _connect(self, address: str, incarnation: str) -> asyncio.Task[Link]:
        """As a task that several openings wait for: one connection is made, and none of them can cancel it."""
        task = asyncio.create_task(self._greet(address, incarnation))
        self._peers[address, incarnation] = task
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _greet(self, address: str, incarnation: str) -> Link:
        connection = await self.plane.connect(address)
        self.counts["connects"] += 1
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await send_control(connection, self.hello)
                reply = await recv_control(connection)
            if not isinstance(reply, HelloReply):
                raise WireError(f"a {type(reply).__name__} in answer to the hello")
            other = reply.hello.incarnation != incarnation
            difference = "incarnation" if other else not reply.refused and self.hello.difference(reply.hello)
            if reply.refused or difference:
                raise PairingRefused(f"{address} is no pair of this worker: {reply.refused or f'{difference} differs'}")
            return Link(self, connection, await self.plane.lane(connection))
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


def _connected(task: asyncio.Task[Link]) -> Link | None:
    """What a finished attempt to connect has brought."""
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None
