"""A runner without a model: the "KV" of a token is a hash of every token up to it, so a slot that was never written,
was overwritten, or belongs to another prefix is noticed the moment it is read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from engine.messages import Buffer
from engine.runner import SampledToken, Slots, StepBatch

VOCAB = 50
KV_BYTES = 8


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    """KV of each token: depends on it and on all before it."""
    state, hashes = xxhash.xxh3_64(), []
    for token_id in token_ids:
        state.update(token_id.to_bytes(4, "little"))
        hashes.append(state.intdigest() | 1)  # never 0, which is what an unwritten slot holds
    return hashes


def next_token(token_ids: Sequence[int]) -> int:
    """What this "model" says after these tokens."""
    return prefix_hashes(token_ids)[-1] // 7 % VOCAB


def continuation(token_ids: Sequence[int], count: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(token_ids) :]


class FakeRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv_bytes_per_token = KV_BYTES
        self.slots = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self.num_steps = 0
        self.num_tokens: list[int] = []
        """Tokens of each step."""
        self.known: dict[str, list[int]] = {}
        """Tokens of each request so far, to know what its slots must hold."""

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        self.known[request_id] = list(token_ids)

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        self.num_steps += 1
        self.num_tokens.append(sum(len(seq.token_ids) for seq in batch.seqs))
        sampled = []
        for seq in batch.seqs:
            tokens = self.known[seq.request_id]
            end = seq.start + len(seq.token_ids)
            assert list(seq.token_ids) == tokens[seq.start : end], "other tokens than the request's"
            hashes = prefix_hashes(tokens[:end])
            slots = [seq.block_table[i // self.block_size] * self.block_size + i % self.block_size for i in range(end)]
            assert self.slots[slots[: seq.start]].tolist() == hashes[: seq.start], "the KV of another prefix, or none"
            self.slots[slots[seq.start :]] = hashes[seq.start :]
            if seq.sample is not None:
                assert end == len(tokens), "sampled before the end of the sequence"
                assert seq.sample.output_index == len(seq.sample.output_token_ids)
                token = next_token(tokens)
                tokens.append(token)
                sampled.append(SampledToken(token, None))
        return sampled

    def read_kv(self, slots: Slots, buffer: Buffer) -> None:
        buffer[:] = self.slots[slots].view(np.uint8)

    def write_kv(self, slots: Slots, buffer: Buffer) -> None:
        self.slots[slots] = buffer.view(np.uint64)
