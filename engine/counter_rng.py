"""Random numbers that depend on (seed, choice, index) and on nothing else. Pure.

There is no generator state to carry: a request draws the same number for the same output position alone or in a
batch, after a preemption, and on whichever worker samples that position.
"""

from __future__ import annotations

import hashlib
import struct

_NAME = b"kvbaton-rng-1"
_COUNTER = struct.Struct("<qQQ")


def uniform(seed: int, choice: int, index: int) -> float:
    """A float in [0, 1) with 53 random bits. `seed` fits 64 signed bits; `choice` and `index` are not negative."""
    digest = hashlib.blake2b(_COUNTER.pack(seed, choice, index), digest_size=8, person=_NAME).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
