"""Identity of a checkpoint by content, so that two workers can tell whether KV of one means the same to the other.

Depends on what the network computes and on nothing else: not on paths, time, or how the tensors are cut into
shards.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

from engine.errors import CheckpointError
from engine.model_config import ModelConfig
from engine.models.checkpoint import TensorInfo, read_headers

_FORMAT = "kvbaton model 1"
_WINDOW_BYTES = 4096
_MAX_WINDOWS = 64
# These steer generation, not the values of KV.
_NOT_COMPUTED = {"eos_token_ids", "bos_token_id", "checkpoint_dtype"}


def model_fingerprint(directory: str | Path, config: ModelConfig) -> str:
    """32 hex digits over the configuration and each tensor's name, shape, dtype and bytes.

    A tensor of up to 256 KiB is hashed whole, of a larger one 64 evenly spaced windows of 4 KiB: training that
    moves a tensor moves nearly all of it, and reading everything would double the start-up of a large model.
    """
    digest = hashlib.blake2b(_FORMAT.encode(), digest_size=16)
    for field in fields(config):
        if field.name not in _NOT_COMPUTED:
            digest.update(f"{field.name}={getattr(config, field.name)!r}\n".encode())
    for name, info in sorted(read_headers(Path(directory)).items()):
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        _update(digest, info)
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, info: TensorInfo) -> None:
    try:
        with info.path.open("rb") as file:
            for offset, length in _windows(info.num_bytes):
                file.seek(info.start + offset)
                digest.update(file.read(length))
    except OSError as error:
        raise CheckpointError(f"cannot read {info.path}: {error.strerror or error}") from error


def _windows(num_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of what is hashed of a tensor; the first and the last bytes are always part of it."""
    if num_bytes <= _WINDOW_BYTES * _MAX_WINDOWS:
        return [(0, num_bytes)]
    last = num_bytes - _WINDOW_BYTES
    return [(last * i // (_MAX_WINDOWS - 1), _WINDOW_BYTES) for i in range(_MAX_WINDOWS)]
