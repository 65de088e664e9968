"""The contract of a fabric: connections between processes that carry whole messages on two channels.

A plane belongs to one event loop. Every implementation passes the same test bodies.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

CONNECT_TIMEOUT_S = 5.0


class Channel(enum.IntEnum):
    """Messages of one channel arrive in order; the channels are independent of each other."""

    CONTROL = 1
    PAYLOAD = 2


class Connection(ABC):
    """Both ends may send and receive at once. Several sends and receives of a channel may be under way: messages go
    to receives in the order in which each were started."""

    peer: str

    @abstractmethod
    async def send(self, buffer: Any, channel: Channel) -> None:
        """Give one message to the fabric. Its return proves nothing about delivery, but the buffer is free again, as
        it is after ConnectionLost. After a cancel the fabric may still be reading it. Raises ConnectionLost."""

    @abstractmethod
    async def recv(self, buffer: Any, channel: Channel) -> None:
        """Fill `buffer`, wholly or in part, with the next message. Raises ConnectionLost.

        Cancelling the wait does not stop the fabric from writing: until `recv` has returned or `abort` was called and
        `settled` awaited, the buffer must not be reused."""

    @abstractmethod
    def abort(self) -> None:
        """End the connection now. Pending calls raise ConnectionLost. May be called twice."""

    @abstractmethod
    async def settled(self) -> bool:
        """After `abort`: True once nothing can be written into any buffer of this connection any more, False when
        that could not be proven within a bound."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Ended by either side, or lost."""


class Plane(ABC):
    """`name` is what settings call it."""

    name: str

    @abstractmethod
    async def listen(self, on_connection: Callable[[Connection], Awaitable[None]], *, ephemeral: bool = False) -> str:
        """Accept connections, each served by a task of `on_connection`. Returns the address that peers reach.
        `ephemeral`: on any free address instead of the configured one. Raises FabricUnavailable."""

    @abstractmethod
    async def stop_listening(self, address: str) -> None:
        """Accept no more there; connections go on."""

    @abstractmethod
    async def connect(self, address: str) -> Connection:
        """Within CONNECT_TIMEOUT_S. Raises ConnectFailed, which names the address and the devices."""

    @abstractmethod
    async def lane(self, connection: Connection) -> str:
        """What really carries the bytes of a connection, in the fabric's own words."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening, end every connection. Bounded. May be called twice."""
