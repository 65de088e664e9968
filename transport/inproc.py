"""A plane within one process: the contract of plane.py over queues. For tests and for workers that share a process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from transport.errors import ConnectFailed, ConnectionLost, TransportError
from transport.plane import Channel, Connection, Plane

_listeners: dict[str, InprocPlane] = {}
"""address -> the plane that listens there; the one registry of a process, as its port table is."""
_numbers = itertools.count(1)
MAX_QUEUED = 4
"""Messages a channel holds before a send waits: a slow reader holds its sender back, as on a real fabric."""


class InprocPlane(Plane):
    name = "inproc"

    def __init__(self, address: str | None = None) -> None:
        self._address = address or f"inproc:{next(_numbers)}"
        self._served: dict[str, Callable[[Connection], Awaitable[None]]] = {}
        self._connections: set[InprocConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, on_connection: Callable[[Connection], Awaitable[None]], *, ephemeral: bool = False) -> str:
        address = f"inproc:{next(_numbers)}" if ephemeral else self._address
        self._served[address] = on_connection
        _listeners[address] = self
        return address

    async def stop_listening(self, address: str) -> None:
        del self._served[address], _listeners[address]

    async def connect(self, address: str) -> Connection:
        listener = _listeners.get(address)
        if listener is None:
            raise ConnectFailed(f"nobody listens on {address}")
        ours, theirs = InprocConnection(address), InprocConnection(self._address)
        ours.other, theirs.other = theirs, ours
        self._connections.add(ours)
        listener._accept(theirs, listener._served[address])
        return ours

    def _accept(self, connection: InprocConnection, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self._connections.add(connection)
        task = asyncio.ensure_future(self._serve(connection, serve))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: InprocConnection, serve: Callable[[Connection], Awaitable[None]]) -> None:
        try:
            await serve(connection)
        except TransportError:
            pass  # the peer has gone; whoever serves has been told by the same exception
        finally:
            connection.abort()
            self._connections.discard(connection)

    async def lane(self, connection: Connection) -> str:
        return "inproc"

    async def close(self) -> None:
        for address in list(self._served):
            await self.stop_listening(address)
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class InprocConnection(Connection):
    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.other: InprocConnection | None = None
        self._inbox: dict[Channel, asyncio.Queue[bytes]] = {c: asyncio.Queue(MAX_QUEUED) for c in Channel}
        self._send_turn = {c: asyncio.Lock() for c in Channel}
        self._recv_turn = {c: asyncio.Lock() for c in Channel}
        self._gone = asyncio.Event()

    async def send(self, buffer: Any, channel: Channel) -> None:
        assert self.other is not None
        message = bytes(memoryview(buffer).cast("B"))
        async with self._send_turn[channel]:  # first come, first served, also while the queue is full
            await self._unless_gone(self.other._inbox[channel].put(message))

    async def recv(self, buffer: Any, channel: Channel) -> None:
        async with self._recv_turn[channel]:
            inbox = self._inbox[channel]
            message: bytes = inbox.get_nowait() if not inbox.empty() else await self._unless_gone(inbox.get())
        view = memoryview(buffer).cast("B")
        if len(message) > len(view):
            raise ConnectionLost(f"a message of {len(message)} bytes for a buffer of {len(view)}")
        view[: len(message)] = message

    async def _unless_gone(self, operation: Any) -> Any:
        waiting = asyncio.ensure_future(operation)
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():  # what came before the end is still handed over
                return waiting.result()
            raise ConnectionLost(f"the connection to {self.peer} has ended")
        finally:
            for task in (waiting, gone):
                task.cancel()

    def abort(self) -> None:
        self._gone.set()
        if self.other is not None:
            self.other._gone.set()

    async def settled(self) -> bool:
        return True

    @property
    def closed(self) -> bool:
        return self._gone.is_set()
