"""Bytes per second of a whole handoff against the raw figure of the fabric for the same bytes in the same run.

Two processes. Raw: one message of the size into a buffer that is there, then one byte back. Handoff: gather by copy,
checksum, segments, verification, a copy out again, commit, acknowledgement. The two alternate; medians and spread.

What the checksum costs is measured in both ways it can be meant: its own time at the sender, as a share of the
transfer, and how much longer the transfer is than one to a second receiver where both sides leave it out.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from transport import receiver as receiver_module
from transport import shipment as shipment_module
from transport.checksum import checksum
from transport.layout import KvLayout
from transport.messages import Hello
from transport.plane import Channel, Connection
from transport.receiver import Grant, KvReceiver
from transport.sender import KvSender
from transport.transfer import TransferStats
from transport.ucx import UcxPlane

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
SIZES_MB = (1, 4, 16, 64)
REPEATS = 15
KEY = b"k" * 32
SEGMENT_BYTES = 4 << 20
FINGERPRINT: dict[str, str | int] = {"model": "benchmark"}


def num_tokens(size_mb: int) -> int:
    return (size_mb << 20) // LAYOUT.bytes_per_token


class CopyOut:
    """Stands for the scatter into blocks."""

    def __init__(self, blocks: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._blocks = blocks

    async def write(self, start: int, count: int, buffer: Any) -> bool:
        at = start * LAYOUT.bytes_per_token
        target = self._blocks[at : at + len(buffer)]
        await asyncio.to_thread(np.copyto, target, buffer)
        return True

    def committed(self, meta: bytes, stats: TransferStats) -> None:
        pass

    def failed(self, reason: str) -> None:
        print(reason, file=sys.stderr)


def _no_checksum(buffer: Any) -> int:
    return 0


async def _serve(*, unchecked: bool) -> None:
    """The receiving process: both addresses on standard output, until its standard input ends."""
    if unchecked:
        receiver_module.checksum = _no_checksum  # type: ignore[attr-defined]
    plane = UcxPlane()
    blocks = np.zeros(num_tokens(max(SIZES_MB)) * LAYOUT.bytes_per_token, dtype=np.uint8)
    raw = np.zeros(max(SIZES_MB) << 20, dtype=np.uint8)

    async def echo(connection: Connection) -> None:
        while True:
            size = np.zeros(8, dtype=np.uint8)
            await connection.recv(size, Channel.CONTROL)
            await connection.recv(raw[: int(size.view(np.uint64)[0])], Channel.PAYLOAD)
            await connection.send(np.ones(1, dtype=np.uint8), Channel.CONTROL)

    receiver = KvReceiver(
        plane,
        LAYOUT,
        Hello("receiver", FINGERPRINT),
        max_segment_bytes=SEGMENT_BYTES,
        max_staging_bytes=64 << 20,
    )
    await receiver.start()
    for size_mb in SIZES_MB:
        for repeat in range(REPEATS + 1):
            grant = Grant(_handoff_id(size_mb, repeat), 1, KEY, 0, num_tokens(size_mb), lease_s=600.0, sender="sender")
            receiver.expect(grant, CopyOut(blocks))
    print(await plane.listen(echo, ephemeral=True), receiver.address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await receiver.close()
    await plane.close()


def _handoff_id(size_mb: int, repeat: int) -> bytes:
    return size_mb.to_bytes(8, "big") + repeat.to_bytes(8, "big")


async def _measure(raw_address: str, address: str, unchecked_address: str) -> dict[str, Any]:
    plane = UcxPlane()
    connection = await plane.connect(raw_address)
    sender = KvSender(plane, LAYOUT, Hello("sender", FINGERPRINT), max_segment_bytes=SEGMENT_BYTES)
    blocks = np.random.default_rng(0).integers(0, 256, max(SIZES_MB) << 20, dtype=np.uint8)

    async def read(start: int, count: int, buffer: Any) -> bool:
        at = start * LAYOUT.bytes_per_token
        await asyncio.to_thread(np.copyto, buffer, blocks[at : at + len(buffer)])
        return True

    async def raw(num_bytes: int) -> None:
        size = np.array([num_bytes], dtype=np.uint64).view(np.uint8)
        await connection.send(size, Channel.CONTROL)
        await connection.send(blocks[:num_bytes], Channel.PAYLOAD)
        await connection.recv(np.zeros(1, dtype=np.uint8), Channel.CONTROL)

    async def handoff(size_mb: int, repeat: int, where: str) -> None:
        shipment_module.checksum = _no_checksum if where == unchecked_address else checksum  # type: ignore[attr-defined]
        tokens = num_tokens(size_mb)
        fields = {"peer_incarnation": "receiver", "handoff_id": _handoff_id(size_mb, repeat), "attempt": 1}
        shipment = await sender.open(where, key=KEY, start=0, end=tokens, deadline_s=60.0, read=read, **fields)
        await shipment.ship(tokens)
        await shipment.commit(b"")

    rows = []
    for size_mb in SIZES_MB:
        num_bytes = num_tokens(size_mb) * LAYOUT.bytes_per_token
        seconds: dict[str, list[float]] = {"raw": [], "handoff": [], "unchecked": []}
        check_us = 0
        for repeat in range(REPEATS + 1):
            marks = [time.perf_counter()]
            await raw(num_bytes)
            marks.append(time.perf_counter())
            before = sender.counts["checksum_us"]
            await handoff(size_mb, repeat, address)
            marks.append(time.perf_counter())
            check_us += (sender.counts["checksum_us"] - before) * (repeat > 0)
            await handoff(size_mb, repeat, unchecked_address)
            marks.append(time.perf_counter())
            if repeat:  # the first warms up buffers and connections
                for name, took in zip(seconds, np.diff(marks), strict=True):
                    seconds[name].append(float(took))
        rows.append(_row(size_mb, num_bytes, seconds, check_us / 1e6))
    lane = await plane.lane(connection)
    connection.abort()
    await sender.close()
    await plane.close()
    return {"benchmark": "transfer", "lane": lane, "segment_bytes": SEGMENT_BYTES, "repeats": REPEATS, "rows": rows}


def _row(size_mb: int, num_bytes: int, seconds: dict[str, list[float]], check_s: float) -> dict[str, Any]:
    ours = seconds["handoff"]
    return {
        "mb": size_mb,
        "raw_gb_s": _spread([num_bytes / took / 1e9 for took in seconds["raw"]]),
        "handoff_gb_s": _spread([num_bytes / took / 1e9 for took in ours]),
        "handoff / raw": _spread([r / o for r, o in zip(seconds["raw"], ours, strict=True)]),
        "checksum_share_at_the_sender": round(check_s / sum(ours), 4),
        "checked / unchecked, time": _spread([o / u for o, u in zip(ours, seconds["unchecked"], strict=True)]),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 3),
        "median": round(statistics.median(values), 3),
        "max": round(max(values), 3),
    }


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(_serve(unchecked="unchecked" in sys.argv))
        return 0
    command = [sys.executable, "-m", "benchmarks.bench_transfer", "serve"]
    with _server(command) as server, _server([*command, "unchecked"]) as other:
        raw_address, address = _addresses(server)
        _, unchecked_address = _addresses(other)
        try:
            result = asyncio.run(_measure(raw_address, address, unchecked_address))
        finally:
            server.communicate("")
            other.communicate("")
    json.dump(result, sys.stdout, indent=2)
    print()
    return 0


def _server(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _addresses(server: subprocess.Popen[str]) -> list[str]:
    assert server.stdout is not None
    return server.stdout.readline().split()


if __name__ == "__main__":
    sys.exit(main())
