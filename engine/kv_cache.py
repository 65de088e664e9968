"""The paged KV cache: one tensor, and the way between its slots and host buffers in the wire layout.

Owned by the model runner, touched on the engine thread only. Which block belongs to whom is the block pool's
business; this module knows slots: block_id * block_size + offset.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ConfigError
from engine.messages import Buffer
from engine.model_config import Dtype, ModelConfig
from engine.runner import Slots

# Below this many tokens a run of consecutive slots on average, one fancy index beats a loop over the runs.
_MIN_RUN_TOKENS = 4


class KvCache:
    """`data` (num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim), K before V.

    Layer-major and token-major inside: a run of slots is contiguous in each layer, as it is on the wire. All pages
    are zeroed, so the memory is committed here and not in the middle of serving, and padding is never NaN.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: Dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_token = config.kv_bytes_per_token(dtype)
        self._num_rows = 2 * config.num_layers
        self._row_bytes = self.bytes_per_token // self._num_rows
        shape = (config.num_layers, 2, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        try:
            self.data = torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        except RuntimeError as error:  # torch has no exception of its own for host memory
            size = num_blocks * block_size * self.bytes_per_token
            raise ConfigError(f"cannot allocate {size} bytes for {num_blocks} KV blocks: {error}") from error
        # The same memory as bytes, (2 * num_layers, num_slots, row_bytes), for numpy where it can reach.
        self._bytes = self.data.view(self._num_rows, num_blocks * block_size, -1).view(torch.uint8)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each (num_slots, num_kv_heads, head_dim), as views."""
        pages = self.data[layer]
        return pages[0], pages[1]

    def read(self, slots: Slots, buffer: Buffer) -> None:
        """Gather `slots` into `buffer`, laid out (num_layers, 2, len(slots), num_kv_heads, head_dim)."""
        out = self._shaped(slots, buffer)
        if self._bytes.is_cuda:
            out[...] = self._bytes.index_select(1, torch.from_numpy(slots).to(self._bytes.device)).cpu().numpy()
            return
        pages = self._bytes.numpy()
        runs = _runs(slots)
        if len(slots) < _MIN_RUN_TOKENS * len(runs):
            np.take(pages, slots, axis=1, out=out, mode="clip")
            return
        for start, slot, length in runs:
            out[:, start : start + length] = pages[:, slot : slot + length]

    def write(self, slots: Slots, buffer: Buffer) -> None:
        """Scatter `buffer`, laid out as for `read`, into `slots`, which are distinct."""
        source = self._shaped(slots, buffer)
        if self._bytes.is_cuda:
            # A copy, because torch refuses to wrap memory that may not be written to.
            rows = torch.from_numpy(np.array(source)).to(self._bytes.device)
            self._bytes.index_copy_(1, torch.from_numpy(slots).to(self._bytes.device), rows)
            return
        pages = self._bytes.numpy()
        runs = _runs(slots)
        if len(slots) < _MIN_RUN_TOKENS * len(runs):
            pages[:, slots] = source
            return
        for start, slot, length in runs:
            pages[:, slot : slot + length] = source[:, start : start + length]

    def _shaped(self, slots: Slots, buffer: Buffer) -> Buffer:
        assert buffer.nbytes == len(slots) * self.bytes_per_token, (
            buffer.nbytes,
            len(slots),
            self.bytes_per_token,
        )
        num_slots = self._bytes.shape[1]
        assert len(slots) == 0 or (slots.min() >= 0 and slots.max() < num_slots), (slots.min(), slots.max())
        return buffer.reshape(self._num_rows, len(slots), self._row_bytes)


def _runs(slots: Slots) -> list[tuple[int, int, int]]:
    """(index of the first, its slot, length) of each maximal run of consecutive slots."""
    if len(slots) == 0:
        return []
    cuts: npt.NDArray[np.int64] = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(slots)]
    return [(start, int(slots[start]), end - start) for start, end in zip(starts, ends, strict=True)]
