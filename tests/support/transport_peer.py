"""One end of transfers over real UCX in a process of its own, told what to do by lines of JSON.

    python -m tests.support.transport_peer receiver PORT INCARNATION
    python -m tests.support.transport_peer sender 0 INCARNATION

Commands on standard input, events on standard output; end of input closes the peer, with status 0.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from typing import Any

from tests.support.kv_pair import KEY, LAYOUT, SEGMENT_BYTES, Blocks, kv
from transport.errors import TransportError
from transport.messages import Hello
from transport.receiver import Grant, KvReceiver
from transport.sender import KvSender
from transport.transfer import TransferStats
from transport.ucx import UcxPlane

SILENCE_S = 1.5


def tell(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event} | fields), flush=True)


class TellingBlocks(Blocks):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    async def write(self, start: int, num_tokens: int, buffer: Any) -> bool:
        written = await super().write(start, num_tokens, buffer)
        tell("written", number=self._number, start=start)
        return written

    def committed(self, meta: bytes, stats: TransferStats) -> None:
        wrong = [token for token, content in self.tokens.items() if content != kv(token, 1).tobytes()]
        tell("committed", number=self._number, num_tokens=len(self.tokens), wrong=wrong)

    def failed(self, reason: str) -> None:
        tell("failed", number=self._number, reason=reason)


class Receiver:
    def __init__(self, plane: UcxPlane, incarnation: str) -> None:
        self._end = KvReceiver(
            plane,
            LAYOUT,
            Hello(incarnation, {"model": "m"}),
            max_segment_bytes=SEGMENT_BYTES,
            max_staging_bytes=8 * SEGMENT_BYTES,
        )

    async def start(self) -> None:
        await self._end.start()
        tell("address", address=self._end.address)

    def expect(self, number: int, num_tokens: int, lease_s: float, sender: str) -> None:
        grant = Grant(number.to_bytes(16, "big"), 1, KEY, 0, num_tokens, lease_s, sender)
        self._end.expect(grant, TellingBlocks(number))
        tell("expecting", number=number)

    def cancel(self, number: int) -> None:
        self._end.cancel(number.to_bytes(16, "big"))

    def snapshot(self) -> None:
        tell("snapshot", **self._end.snapshot())

    async def close(self) -> None:
        await self._end.close()


class Sender:
    def __init__(self, plane: UcxPlane, incarnation: str) -> None:
        hello = Hello(incarnation, {"model": "m"})
        self._end = KvSender(plane, LAYOUT, hello, max_segment_bytes=SEGMENT_BYTES, silence_s=SILENCE_S)
        self._plane = plane
        self._tasks: set[asyncio.Task[None]] = set()
        self._go = asyncio.Event()

    async def start(self) -> None:
        tell("started")

    def ship(self, number: int, num_tokens: int, address: str, incarnation: str, hold_at: int | None) -> None:
        """Holds before the segment that begins at or after `hold_at`, until `go`."""
        task = asyncio.create_task(self._ship(number, num_tokens, address, incarnation, hold_at))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connect(self, address: str) -> None:
        """Only that, and whatever becomes of it is forgotten."""
        task = asyncio.create_task(self._connect(address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, address: str) -> None:
        try:
            (await self._plane.connect(address)).abort()
            outcome = "connected"
        except TransportError as error:
            outcome = str(error)
        gc.collect()
        tell("connect", outcome=outcome)

    def go(self) -> None:
        self._go.set()

    async def _ship(self, number: int, num_tokens: int, address: str, incarnation: str, hold_at: int | None) -> None:
        async def read(start: int, count: int, buffer: Any) -> bool:
            if hold_at is not None and start >= hold_at and not self._go.is_set():
                tell("holding", number=number)
                await self._go.wait()
            buffer[:] = kv(start, count)
            return True

        try:
            shipment = await self._end.open(
                address,
                peer_incarnation=incarnation,
                handoff_id=number.to_bytes(16, "big"),
                attempt=1,
                key=KEY,
                start=0,
                end=num_tokens,
                deadline_s=60.0,
                read=read,
            )
            try:
                await shipment.ship(num_tokens)
                stats = await shipment.commit(b"meta")
            finally:
                await shipment.abort("the test is over")
            tell("acked", number=number, lane=stats.lane)
        except TransportError as error:
            tell("failed", number=number, reason=str(error), type=type(error).__name__)

    def snapshot(self) -> None:
        tell("snapshot", **self._end.snapshot())

    async def close(self) -> None:
        await self._end.close()


async def main(role: str, port: str, incarnation: str) -> None:
    plane = UcxPlane(port=int(port))
    try:
        peer: Receiver | Sender = (Receiver if role == "receiver" else Sender)(plane, incarnation)
        await peer.start()
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            command = json.loads(line)
            getattr(peer, command.pop("do"))(**command)
        await peer.close()
    finally:
        await plane.close()  # without it the process would never end


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
