"""A fault shim: a plane whose connections damage what this side sends. Off unless a test setting is on.

Faults are a comma-separated list of `action:kind:k`, with `:seconds` behind a delay:

    drop:commit:1            the first commit is not sent, and reported as sent
    duplicate:segment:2      the second segment is sent twice, header and payload
    corrupt:segment:3        one byte of the third payload is flipped (of any other kind: one byte of the message)
    delay:ack:1:0.5          the first acknowledgement is sent half a second late, everything behind it in time
    fail:segment:2           the second segment cannot be posted: ConnectionLost

kind: segment, or the tag of a control message: open, commit, ack, resend, renew, alive, abort, hello, hello-reply.
`k` counts from 1 over all connections of the plane; `*` is every one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport import messages
from transport.errors import ConnectionLost
from transport.plane import Channel, Connection, Plane

ACTIONS = ("drop", "duplicate", "corrupt", "delay", "fail")
KINDS = tuple(kind.__struct_config__.tag for kind in messages.Control.__args__)


@dataclass(frozen=True, slots=True)
class Fault:
    action: str
    kind: str
    number: int | None
    """None: every one."""
    delay_s: float = 0.0


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Raises ValueError, which names the part at fault."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(text: str) -> Fault:
    action, _, rest = text.partition(":")
    kind, _, rest = rest.partition(":")
    number, _, delay = rest.partition(":")
    if action not in ACTIONS or kind not in KINDS or (bool(delay) != (action == "delay")):
        raise ValueError(f"not a fault: {text!r}")
    try:
        return Fault(action, kind, None if number == "*" else int(number), float(delay or 0))
    except ValueError as error:
        raise ValueError(f"not a fault: {text!r}") from error


class FaultyPlane(Plane):
    """`injected` counts the faults that were done, by "action:kind"."""

    def __init__(self, plane: Plane, faults: str) -> None:
        self.name = plane.name
        self.injected: Counter[str] = Counter()
        self._plane = plane
        self._faults = parse_faults(faults)
        self._seen: Counter[str] = Counter()

    def set(self, faults: str) -> None:
        """In place of those that were; counting starts anew. Raises ValueError."""
        self._faults = parse_faults(faults)
        self._seen.clear()
        self.injected.clear()

    def stop(self) -> None:
        """From here on every message passes."""
        self._faults = ()

    def fault(self, kind: str) -> Fault | None:
        """What is to befall the next message of this kind."""
        self._seen[kind] += 1
        for fault in self._faults:
            if fault.kind == kind and fault.number in (None, self._seen[kind]):
                self.injected[f"{fault.action}:{kind}"] += 1
                return fault
        return None

    async def listen(self, on_connection: Callable[[Connection], Awaitable[None]], *, ephemeral: bool = False) -> str:
        async def serve(connection: Connection) -> None:
            await on_connection(FaultyConnection(self, connection))

        return await self._plane.listen(serve, ephemeral=ephemeral)

    async def stop_listening(self, address: str) -> None:
        await self._plane.stop_listening(address)

    async def connect(self, address: str) -> Connection:
        return FaultyConnection(self, await self._plane.connect(address))

    async def lane(self, connection: Connection) -> str:
        assert isinstance(connection, FaultyConnection)
        return await self._plane.lane(connection.inner)

    async def close(self) -> None:
        await self._plane.close()


class FaultyConnection(Connection):
    """A header and its payload share one fault: what befalls the header is kept for the payload behind it."""

    def __init__(self, plane: FaultyPlane, inner: Connection) -> None:
        self.inner = inner
        self.peer = inner.peer
        self._plane = plane
        self._payload_faults: deque[Fault | None] = deque()

    async def send(self, buffer: Any, channel: Channel) -> None:
        if channel is Channel.PAYLOAD:
            fault = self._payload_faults.popleft() if self._payload_faults else None
        else:
            kind = type(messages.decode(memoryview(buffer))).__struct_config__.tag
            fault = self._plane.fault(str(kind))
            if kind == "segment":
                self._payload_faults.append(fault)
                if fault is not None and fault.action == "corrupt":
                    fault = None  # the payload's, not the header's
        await self._send(buffer, channel, fault)

    async def _send(self, buffer: Any, channel: Channel, fault: Fault | None) -> None:
        action = fault.action if fault is not None else ""
        if action == "drop":
            return
        if action == "fail":
            raise ConnectionLost("the message could not be posted")
        if action == "corrupt":
            buffer = np.array(buffer, copy=True)
            buffer[len(buffer) // 2] ^= 0x10
        if fault is not None and action == "delay":
            await asyncio.sleep(fault.delay_s)
        if action == "duplicate":
            await asyncio.gather(self.inner.send(buffer, channel), self.inner.send(buffer, channel))
        else:
            await self.inner.send(buffer, channel)

    async def recv(self, buffer: Any, channel: Channel) -> None:
        await self.inner.recv(buffer, channel)

    def abort(self) -> None:
        self.inner.abort()

    async def settled(self) -> bool:
        return await self.inner.settled()

    @property
    def closed(self) -> bool:
        return self.inner.closed
