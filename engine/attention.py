"""Attention over the paged cache in plain torch: the plan of a step, and its execution layer by layer.

Called by the model runner on the engine thread. A plan is made once a step and used by every layer; it fixes the
order of rows: decoding sequences first, longest context first, then prefill chunks. Each sequence reads its own
blocks only, so its result does not depend on its neighbours beyond rounding.

    decode     several sequences of one row each: their blocks are gathered, padded to the longest of the group
    prefill    one sequence at a time: causal over its cached prefix and itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_cache import KvCache
from engine.runner import ScheduledSeq

# Gathered keys and values of a decode group should still be in the L2 cache when attention reads them: measured
# on one core, 1,024 tokens beat one large padded group by 1.2 to 2.5 times from 32 sequences on. A GPU wants few,
# large launches instead.
_GROUP_TOKENS_CPU = 1024
_GROUP_TOKENS_CUDA = 1 << 17
# A sequence joins a group only if at least half of its padded context is real.
_MAX_PADDING = 2


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    rows: slice
    blocks: torch.Tensor
    """(num_seqs * max_blocks,): each sequence's context blocks, padded by repeating its first."""
    mask: torch.Tensor | None
    """(num_seqs, 1, 1, max_blocks * block_size), 0 or -inf; None where nothing is padding."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    rows: slice
    context_len: int
    """Tokens of prefix and chunk."""
    blocks: torch.Tensor | None
    """Blocks of prefix and chunk; None without a prefix: the chunk's own keys are all there is."""
    mask: torch.Tensor | None
    """(chunk, context_len), 0 or -inf; None without a prefix, where plain causality says the same."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    order: list[int]
    """Indices into the batch, in row order."""
    slots: torch.Tensor
    """(T,): where each row's key and value are written."""
    decodes: list[DecodeGroup]
    prefills: list[PrefillChunk]


class PagedAttention:
    """One step's attention over `cache`, for `LlamaModel.forward`."""

    def __init__(self, cache: KvCache, plan: AttentionPlan) -> None:
        self._cache = cache
        self._plan = plan

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.layer(layer)
        keys.index_copy_(0, self._plan.slots, k)
        values.index_copy_(0, self._plan.slots, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._plan.decodes:
            self._decode(group, keys, values, q[group.rows], out[group.rows])
        for chunk in self._plan.prefills:
            rows = chunk.rows
            if chunk.blocks is None:
                out[rows] = _prefill(q[rows], k[rows], v[rows], None)
            else:
                k_all = self._gather(keys, chunk.blocks)[: chunk.context_len]
                v_all = self._gather(values, chunk.blocks)[: chunk.context_len]
                out[rows] = _prefill(q[rows], k_all, v_all, chunk.mask)
        return out.flatten(1)

    def _decode(
        self,
        group: DecodeGroup,
        keys: torch.Tensor,
        values: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q and out (B, num_heads, head_dim). Heads that share a key head become rows of one small query matrix,
        so that no key is repeated."""
        num_seqs, _, head_dim = q.shape
        num_kv_heads = keys.shape[1]
        k_all = self._gather(keys, group.blocks).view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)
        v_all = self._gather(values, group.blocks).view(num_seqs, -1, num_kv_heads, head_dim).transpose(1, 2)
        queries = q.reshape(num_seqs, num_kv_heads, -1, head_dim)
        result = F.scaled_dot_product_attention(queries, k_all, v_all, attn_mask=group.mask)
        out.copy_(result.reshape(out.shape))

    def _gather(self, pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """(num_slots, num_kv_heads, head_dim) -> (len(blocks) * block_size, num_kv_heads, head_dim)"""
        by_block = pages.view(self._cache.num_blocks, -1)
        return by_block.index_select(0, blocks).view(-1, *pages.shape[1:])


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q (T, num_heads, head_dim), k and v (S, num_kv_heads, head_dim) -> (T, num_heads, head_dim).

    The key heads are the batch and the query heads of each its heads, over keys expanded by a stride of 0.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    shape = (num_kv_heads, num_heads // num_kv_heads, k.shape[0], head_dim)
    queries = q.reshape(num_tokens, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    keys = k.transpose(0, 1)[:, None].expand(shape)
    values = v.transpose(0, 1)[:, None].expand(shape)
    result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
    return result.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def plan_attention(
    seqs: Sequence[ScheduledSeq], block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionPlan:
    """Order the rows, group the decodes, and put every index and mask of the step on the device."""
    # A prompt of a single token is a decode with a context of one.
    decodes = [i for i, seq in enumerate(seqs) if len(seq.token_ids) == 1]
    prefills = [i for i, seq in enumerate(seqs) if len(seq.token_ids) > 1]
    decodes.sort(key=lambda i: seqs[i].start, reverse=True)
    order = decodes + prefills
    slots: list[int] = []
    for i in order:
        slots += _slots(seqs[i], block_size)
    max_tokens = _GROUP_TOKENS_CUDA if device.type == "cuda" else _GROUP_TOKENS_CPU
    groups, row = [], 0
    for members in _group(decodes, seqs, block_size, max_tokens):
        groups.append(_decode_group([seqs[i] for i in members], row, block_size, dtype, device))
        row += len(members)
    chunks = []
    for i in prefills:
        chunks.append(_prefill_chunk(seqs[i], row, block_size, dtype, device))
        row += len(seqs[i].token_ids)
    return AttentionPlan(order, _index(slots, device), groups, chunks)


def _slots(seq: ScheduledSeq, block_size: int) -> list[int]:
    table = seq.block_table
    positions = range(seq.start, seq.start + len(seq.token_ids))
    return [table[pos // block_size] * block_size + pos % block_size for pos in positions]


def _num_context_blocks(seq: ScheduledSeq, block_size: int) -> int:
    return -(-(seq.start + len(seq.token_ids)) // block_size)


def _group(decodes: list[int], seqs: Sequence[ScheduledSeq], block_size: int, max_tokens: int) -> list[list[int]]:
    """Cut `decodes`, longest first, into runs of similar context whose padded size stays under `max_tokens`."""
    groups: list[list[int]] = []
    longest = 0
    for i in decodes:
        num_blocks = _num_context_blocks(seqs[i], block_size)
        fits = groups and (len(groups[-1]) + 1) * longest * block_size <= max_tokens
        if fits and num_blocks * _MAX_PADDING >= longest:
            groups[-1].append(i)
        else:
            groups.append([i])
            longest = num_blocks
    return groups


def _decode_group(
    seqs: list[ScheduledSeq], row: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    max_blocks = _num_context_blocks(seqs[0], block_size)
    blocks: list[int] = []
    for seq in seqs:
        own = _num_context_blocks(seq, block_size)
        blocks += seq.block_table[:own]
        blocks += [seq.block_table[0]] * (max_blocks - own)
    context_lens = torch.tensor([seq.start + 1 for seq in seqs])
    padding = torch.arange(max_blocks * block_size) >= context_lens[:, None]
    mask = None
    if bool(padding.any()):
        mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))
        mask = mask[:, None, None, :].to(device)
    return DecodeGroup(slice(row, row + len(seqs)), _index(blocks, device), mask)


def _prefill_chunk(
    seq: ScheduledSeq, row: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> PrefillChunk:
    num_tokens = len(seq.token_ids)
    rows, context_len = slice(row, row + num_tokens), seq.start + num_tokens
    if seq.start == 0:
        return PrefillChunk(rows, context_len, None, None)
    blocks = _index(list(seq.block_table[: _num_context_blocks(seq, block_size)]), device)
    mask = torch.full((num_tokens, context_len), float("-inf"), dtype=dtype, device=device).triu_(seq.start + 1)
    return PrefillChunk(rows, context_len, blocks, mask)


def _index(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device)
