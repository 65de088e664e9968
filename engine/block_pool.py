"""Who owns each KV block. Pure; called by the scheduler, on the engine thread.

A block is in one state:

    free      holds nothing
    cached    owned by nobody, but holds a full block that can be hit; reclaimed, least recently used first
    running   owned by a request that computes
    reserved  owned by a request whose KV is being shipped in
    held      owned by a request whose KV is being shipped out

Requests may share a block (a prefix hit); it then counts for the first of running, reserved, held that applies.
Only this class touches reference counts. The counts by state always sum to the pool.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Sequence


class Owner(enum.IntEnum):
    """Why a request owns blocks. A shared block counts for its lowest owner."""

    RUNNING = 0
    RESERVED = 1
    HELD = 2


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [[0] * num_blocks for _ in Owner]
        self._num_owned = [0 for _ in Owner]
        self._keys: list[bytes | None] = [None] * num_blocks
        self._block_by_key: dict[bytes, int] = {}
        self._free = deque(range(num_blocks))
        # Blocks with a key and no owner, least recently used first.
        self._reclaimable: OrderedDict[int, float] = OrderedDict()
        """block -> when its last owner let go."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._reclaimable)

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free ones and reclaimable ones."""
        return len(self._free) + len(self._reclaimable)

    @property
    def oldest_cached_at(self) -> float | None:
        """When the block that would be reclaimed next was last owned."""
        return next(iter(self._reclaimable.values()), None)

    def num_owned(self, owner: Owner) -> int:
        return self._num_owned[owner]

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `keys` that is cached. Takes no ownership."""
        blocks = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_needed(self, hits: Sequence[int], num_blocks: int) -> int:
        """How much num_available shrinks when a request of `num_blocks` blocks is given `hits` and new ones."""
        num_unowned = sum(1 for block in hits if self._owner_of(block) is None)
        return num_blocks - len(hits) + num_unowned

    def take(self, hits: Sequence[int], num_new: int, owner: Owner) -> list[int]:
        """A block table: `hits` shared, then `num_new` blocks of unknown content. The caller has checked that
        they are available, and gives each of them back with `free`."""
        assert self.num_needed(hits, len(hits) + num_new) <= self.num_available, "took more blocks than there are"
        for block in hits:
            self._retain(block, owner)
        new = [self._pop() for _ in range(num_new)]
        for block in new:
            self._retain(block, owner)
        return [*hits, *new]

    def free(self, blocks: Sequence[int], owner: Owner, now: float = 0.0) -> None:
        """Give up one ownership of each block. Blocks with a key stay cached; the end of a prefix, which is
        worth less than its beginning, is reclaimed first."""
        for block in reversed(blocks):
            self._release(block, owner, now)

    def move(self, blocks: Sequence[int], old: Owner, new: Owner) -> None:
        """One ownership of each block changes its reason."""
        for block in blocks:
            self._retain(block, new)
            self._release(block, old, 0.0)  # never to nobody

    def publish(self, block: int, key: bytes) -> None:
        """From now on `key` hits `block`, whose KV is complete and never changes again.

        A key that another block already has stays there: both hold the same KV, one is enough.
        """
        assert self._owner_of(block) is not None, f"published block {block}, which nobody owns"
        assert self._keys[block] in (None, key), f"block {block} was published under another key"
        if key not in self._block_by_key:
            self._block_by_key[key] = block
            self._keys[block] = key

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state. Walks the pool."""
        owners = [self._owner_of(block) for block in range(self.num_blocks)]
        unowned = {block for block, owner in enumerate(owners) if owner is None}
        free, cached = set(self._free), set(self._reclaimable)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & cached, f"blocks both free and cached: {free & cached}"
        assert free | cached == unowned, f"blocks lost or owned while free: {(free | cached) ^ unowned}"
        assert all(refs >= 0 for counts in self._refs for refs in counts), "negative reference count"
        assert self._num_owned == [owners.count(owner) for owner in Owner], "counts by owner have drifted"
        assert len(free) + len(cached) + sum(self._num_owned) == self.num_blocks, "states do not sum to the pool"
        keyed = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keyed == self._block_by_key, "keys of blocks and blocks of keys disagree"
        assert all((self._keys[block] is not None) == (block in cached) for block in unowned), "key without a hit"

    def num_refs(self, block: int, owner: Owner) -> int:
        return self._refs[owner][block]

    def _owner_of(self, block: int) -> Owner | None:
        for owner in Owner:
            if self._refs[owner][block]:
                return owner
        return None

    def _retain(self, block: int, owner: Owner) -> None:
        before = self._owner_of(block)
        if before is None:
            self._reclaimable.pop(block, None)
        self._refs[owner][block] += 1
        self._count(before, self._owner_of(block))

    def _release(self, block: int, owner: Owner, now: float) -> None:
        assert self._refs[owner][block] > 0, f"block {block} was freed twice"
        before = self._owner_of(block)
        self._refs[owner][block] -= 1
        after = self._owner_of(block)
        self._count(before, after)
        if after is None:
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._reclaimable[block] = now

    def _count(self, before: Owner | None, after: Owner | None) -> None:
        if before is not None:
            self._num_owned[before] -= 1
        if after is not None:
            self._num_owned[after] += 1

    def _pop(self) -> int:
        """A block without owner or key."""
        if self._free:
            return self._free.popleft()
        block, _ = self._reclaimable.popitem(last=False)
        key = self._keys[block]
        assert key is not None, "a reclaimable block has a key"
        del self._block_by_key[key]
        self._keys[block] = None
        return block
