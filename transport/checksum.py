"""The checksum of a segment, and the digest over all of them that a commit carries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash


def checksum(buffer: Any) -> int:
    """64-bit XXH3: it runs at the speed of memory, several times that of CRC-32, and a flipped, lost or misplaced
    byte passes it once in 2**64. It guards against faults, not against an attacker: that is the key's work."""
    return int(xxhash.xxh3_64_intdigest(buffer))


def digest(segments: Iterable[tuple[int, int, int]]) -> int:
    """Over (start, num_tokens, checksum) of every segment, in order of start."""
    state = xxhash.xxh3_64()
    for segment in sorted(segments):
        state.update(b"".join(value.to_bytes(8, "little") for value in segment))
    return int(state.intdigest())
