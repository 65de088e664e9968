"""A sender and a receiver over one plane, KV that can be told apart, and a sink that keeps what it is given."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from transport.layout import KvLayout
from transport.messages import Hello
from transport.plane import Plane
from transport.receiver import Grant, KvReceiver
from transport.sender import KvSender
from transport.shipment import Shipment
from transport.transfer import TransferStats

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32")
NUM_TOKENS = 1000
SEGMENT_BYTES = 256 << 10
KEY = b"k" * 32


def kv(start: int, num_tokens: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of these tokens' KV: recognisable by position."""
    rows = np.arange(start, start + num_tokens, dtype=np.uint64) * np.uint64(2654435761)
    return np.repeat(rows, LAYOUT.bytes_per_token // 8).view(np.uint8)


class Blocks:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.tokens: dict[int, bytes] = {}
        self.outcome: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()

    async def write(self, start: int, num_tokens: int, buffer: Any) -> bool:
        await asyncio.sleep(0)  # as the engine does, it answers later
        for i, row in enumerate(buffer.reshape(num_tokens, -1)):
            self.tokens[start + i] = row.tobytes()
        return True

    def committed(self, meta: bytes, stats: TransferStats) -> None:
        self.outcome.set_result(("committed", meta))

    def failed(self, reason: str) -> None:
        self.outcome.set_result(("failed", reason))


class Pair:
    """A sender and a receiver over one plane."""

    def __init__(self, plane: Plane, **hello: Any) -> None:
        fingerprint = {"model": "m", "head_dim": 64}
        self.receiver = KvReceiver(
            plane,
            LAYOUT,
            Hello("decode", dict(fingerprint)),
            max_segment_bytes=SEGMENT_BYTES,
            max_staging_bytes=4 * SEGMENT_BYTES,
        )
        self.sender = KvSender(plane, LAYOUT, Hello("prefill", fingerprint | hello), max_segment_bytes=SEGMENT_BYTES)
        self.blocks = Blocks()

    async def open(self, number: int = 0, *, key: bytes = KEY, lease_s: float = 30.0, **options: Any) -> Shipment:
        handoff_id = number.to_bytes(16, "big")
        grant = Grant(handoff_id, attempt=1, key=KEY, start=8, end=NUM_TOKENS, lease_s=lease_s, sender="prefill")
        self.receiver.expect(grant, self.blocks)

        async def read(start: int, num_tokens: int, buffer: Any) -> bool:
            buffer[:] = kv(start, num_tokens)
            return True

        fields = {"peer_incarnation": "decode", "attempt": 1, "key": key, "start": 8, "end": NUM_TOKENS}
        fields |= {"handoff_id": handoff_id, "deadline_s": 20.0, "read": read} | options
        return await self.sender.open(self.receiver.address, **fields)

    async def close(self) -> None:
        await self.sender.close()
        await self.receiver.close()
        for side in (self.sender, self.receiver):
            assert side.snapshot()["open"] == 0
