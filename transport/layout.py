"""The wire layout of KV, and how a token range is cut into segments. Pure.

On the wire KV is (num_layers, 2, num_tokens, num_kv_heads, head_dim), K before V: independent of block size, pool
size and device, so the two sides may differ in those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class KvLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def tokens_per_segment(self, max_segment_bytes: int) -> int:
        """At least one token, however large it is."""
        return max(1, max_segment_bytes // self.bytes_per_token)

    def segments(self, start: int, end: int, max_segment_bytes: int) -> Iterator[tuple[int, int]]:
        """(start, num_tokens) of equal-sized segments that cover [start, end) in order."""
        if start >= end:
            return
        most = self.tokens_per_segment(max_segment_bytes)
        count = -(-(end - start) // most)
        each = -(-(end - start) // count)
        for at in range(start, end, each):
            yield at, min(each, end - at)
