"""Tensors of a Hugging Face checkpoint, read from safetensors files only (no pickle).

    with Checkpoint.open(directory, ...) as checkpoint:     headers are read, files mapped
        checkpoint.take(name, *shape)                       a tensor, cast and on its device
        checkpoint.finish()                                 nothing may be left

Every tensor that a model takes is taken by name; `Checkpoint.finish` refuses what nobody took, so that no weight is
left out in silence.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.json_fields import JsonFields

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_FLOAT_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of a safetensors header. `start` and `end` are offsets in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint, by name. Raises CheckpointError naming the file or tensor at fault."""
    if (directory / INDEX_NAME).exists():
        return _read_sharded(directory)
    if not (directory / SINGLE_NAME).exists():
        raise CheckpointError(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}: only safetensors are read")
    return _read_header(directory / SINGLE_NAME)


def _read_sharded(directory: Path) -> dict[str, TensorInfo]:
    index = JsonFields.read(directory / INDEX_NAME)
    weight_map = index.section("weight_map").values
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted({_shard_name(index, value) for value in weight_map.values()}):
        if not (directory / shard).exists():
            missing = sorted(name for name, value in weight_map.items() if value == shard)
            raise CheckpointError(f"{INDEX_NAME} names {shard}, which is missing; it holds {_listed(missing)}")
        for name, info in _read_header(directory / shard).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name} is in both {tensors[name].path.name} and {shard}")
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(f"{INDEX_NAME} puts tensor {name} in {shard}, which does not hold it")
    return tensors


def _shard_name(index: JsonFields, value: Any) -> str:
    """A plain file name: an index must not reach out of its directory."""
    if not isinstance(value, str) or value in ("", ".", "..") or "/" in value or "\\" in value or "\0" in value:
        raise CheckpointError(f"{index.path}: weight_map names {value!r}, which is no plain file name")
    return value


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        base, size = 8 + length, path.stat().st_size
        return {
            name: _tensor_info(path, name, entry, base, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error


def _tensor_info(path: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    try:
        start, end = entry["data_offsets"]
        info = TensorInfo(path, entry["dtype"], tuple(entry["shape"]), base + start, base + end)
        valid = base <= info.start <= info.end
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: tensor {name} has a malformed header entry") from error
    if not valid or info.end > size:
        raise CheckpointError(f"{path} is cut short: tensor {name} ends past the end of the file")
    return info


class Checkpoint:
    """Hands out each tensor once, cast to `dtype` on `device`, and keeps count of what was taken.

    Use inside `Checkpoint.open`, which unmaps the files at the end; what `take` returned stays valid.
    """

    def __init__(
        self,
        tensors: dict[str, TensorInfo],
        files: dict[Path, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self._tensors = tensors
        self._files = files
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._taken: set[str] = set()
        self._total_bytes = sum(info.num_bytes for info in tensors.values())
        self._done_bytes = 0

    @classmethod
    @contextmanager
    def open(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> Iterator[Checkpoint]:
        tensors = read_headers(directory)
        with ExitStack() as stack:
            files: dict[Path, Any] = {}
            for path in sorted({info.path for info in tensors.values()}):
                try:
                    files[path] = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(f"{path} is no safetensors file: {error}") from error
            yield cls(tensors, files, dtype=dtype, device=device, progress=progress)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """A tensor of its own memory. Raises CheckpointError where it is missing or of another shape or kind."""
        return self.take_rows((name, shape))

    def take_rows(self, *parts: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        """Several tensors stacked along their first dimension, in order, without a copy in between."""
        for name, shape in parts:
            self._check(name, shape)
        num_rows = sum(shape[0] for _, shape in parts)
        out = torch.empty((num_rows, *parts[0][1][1:]), dtype=self._dtype, device=self._device)
        row = 0
        for name, shape in parts:
            out[row : row + shape[0]].copy_(self._read(name))
            row += shape[0]
        return out

    def ignore(self, name: str) -> None:
        """Account for a tensor that the model does not need."""
        self._taken.add(name)

    def finish(self) -> None:
        """Refuse tensors that nobody took."""
        unknown = sorted(self._tensors.keys() - self._taken)
        if unknown:
            raise CheckpointError(f"the checkpoint holds tensors that this model does not have: {_listed(unknown)}")

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        if info.shape != shape:
            raise CheckpointError(f"tensor {name} has shape {list(info.shape)}, config.json asks for {list(shape)}")
        if info.dtype not in _FLOAT_DTYPES:
            raise CheckpointError(f"tensor {name} is {info.dtype}, supported are {', '.join(_FLOAT_DTYPES)}")

    def _read(self, name: str) -> torch.Tensor:
        info = self._tensors[name]
        try:
            tensor: torch.Tensor = self._files[info.path].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"cannot read tensor {name} of {info.path}: {error}") from error
        self._taken.add(name)
        self._done_bytes += info.num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        return tensor


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
