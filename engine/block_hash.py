"""Keys of full KV blocks: a hash chain over token ids. Pure.

A block's KV depends on every token before it, so its key does too: each key covers the key before it. The chain
starts at a root that holds what must never be mixed up: key format, model, and cache domain (tenant, salt).

    root    = H(format, model fingerprint, domain)
    key[0]  = H(root,   tokens of block 0)
    key[i]  = H(key[i-1], tokens of block i)

Fields are typed and length-prefixed before hashing, so no two different lists of fields give the same bytes. The
hash is cryptographic (BLAKE2b, 256 bits): a key is trusted without comparing tokens. Nothing depends on the
process: workers, gateway and a restarted worker compute the same key for the same tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

KEY_BYTES = 32
FORMAT_VERSION = 1
"""Goes into the root, so keys of two formats never meet."""

_ROOT_NAME = b"kvbaton-root"
_BLOCK_NAME = b"kvbaton-block"
_FIELD = struct.Struct("<cQ")


def root_key(model_fingerprint: bytes, domain: bytes) -> bytes:
    """Key that the first block of every request of this model and domain chains from."""
    fields = (
        _field(b"v", struct.pack("<I", FORMAT_VERSION)),
        _field(b"m", model_fingerprint),
        _field(b"d", domain),
    )
    return hashlib.blake2b(b"".join(fields), digest_size=KEY_BYTES, person=_ROOT_NAME).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of the block of `token_ids` (each below 2**32) that follows the block, or root, of key `parent`."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    data = _field(b"p", parent) + _field(b"t", tokens)
    return hashlib.blake2b(data, digest_size=KEY_BYTES, person=_BLOCK_NAME).digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `keys` those of the full blocks of `token_ids` that it lacks. A partial last block has no key."""
    for start in range(len(keys) * block_size, len(token_ids) - block_size + 1, block_size):
        keys.append(block_key(keys[-1] if keys else root, token_ids[start : start + block_size]))


def _field(kind: bytes, value: bytes) -> bytes:
    return _FIELD.pack(kind, len(value)) + value
