"""Turn a GGUF file of a Llama-architecture model into a Hugging Face directory.

    import_gguf(path, out)   config.json, generation_config.json, model.safetensors, tokenizer.json,
                             tokenizer_config.json

Weights are dequantised to float32 values and stored in `dtype`; rows of q and k, which GGUF interleaves for its
rotary embedding, are put back in order. Everything is written to a directory beside `out` that is renamed at the
end, so `out` is there entirely or not at all. What the engine could not compute is refused by name, before anything
is written. Slow (seconds to minutes); run it off the event loop. The one importer of `gguf`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, ItemsView
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError, ConfigError
from engine.gguf_tokenizer import TokenizerFields, write_tokenizer

Progress = Callable[[int, int], None]
"""Called with (weight bytes written, weight bytes in all)."""

MAX_SHARD_BYTES = 4 << 30

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Keys under "llama." that are read, or that change nothing in what is computed.
_KNOWN_KEYS = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
}


class _Metadata:
    """The key-value part of a GGUF file. Errors name the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        if key not in self._values:
            raise ConfigError(f"{self.path}: the key {key} is missing")
        return self._values[key]

    def items(self) -> ItemsView[str, Any]:
        return self._values.items()


def import_gguf(
    path: str | Path, out: str | Path, *, dtype: str = "bfloat16", progress: Progress | None = None
) -> Path:
    """Convert `path` into the new directory `out`, which must not exist. Returns `out`.

    Raises ConfigError or CheckpointError naming the key or tensor that cannot be imported, OSError where the disk
    cannot be written.
    """
    path, out = Path(path), Path(out)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if out.exists():
        raise ConfigError(f"{out} already exists")
    reader = _open(path)
    metadata = _read_metadata(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = _tensor_names(path, tensors)
    config = _config(metadata, set(names.values()), dtype, _vocab_size(path, tensors))
    fields = _tokenizer_fields(metadata)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        write_tokenizer(partial, fields, config["max_position_embeddings"])
        _write_json(partial / "config.json", config)
        special: dict[str, Any] = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
        }
        _write_json(partial / "generation_config.json", special)
        _write_weights(partial, tensors, names, config, _DTYPES[dtype], progress)
        _make_readable(partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _open(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist") from error
    except Exception as error:  # the reader answers bad bytes with whatever numpy or struct raise
        raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error


def _read_metadata(path: Path, reader: gguf.GGUFReader) -> _Metadata:
    metadata = _Metadata(path, {name: field.contents() for name, field in reader.fields.items()})
    architecture = metadata.need("general.architecture")
    if architecture != "llama":
        raise ConfigError(f'{path}: general.architecture is {architecture!r}, only "llama" is supported')
    for key, value in metadata.items():
        name = key.removeprefix("llama.")
        if name != key and name not in _KNOWN_KEYS and value not in (0, False, None):
            raise ConfigError(f"{path}: {key} = {value!r} is not supported")
    return metadata


def _tensor_names(path: Path, tensors: dict[str, Any]) -> dict[str, str]:
    """GGUF name -> Hugging Face name. Raises CheckpointError on a tensor that has none."""
    names = {}
    for name in tensors:
        found = _OUTER_NAMES.get(name) or _layer_name(name)
        if found is None:
            raise CheckpointError(f"{path}: tensor {name} is not supported")
        names[name] = found
    return names


def _layer_name(name: str) -> str | None:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdigit() or parts[3] not in ("weight", "bias"):
        return None
    module = _LAYER_NAMES.get(parts[2])
    if module is None or (parts[3] == "bias" and parts[2].endswith("norm")):
        return None
    return f"model.layers.{parts[1]}.{module}.{parts[3]}"


def _vocab_size(path: Path, tensors: dict[str, Any]) -> int:
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    # GGUF states shapes innermost first.
    return int(tensors["token_embd.weight"].shape[1])


def _config(metadata: _Metadata, names: set[str], dtype: str, vocab_size: int) -> dict[str, Any]:
    num_heads = int(metadata.need("llama.attention.head_count"))
    hidden_size = int(metadata.need("llama.embedding_length"))
    head_dim = int(metadata.get("llama.attention.key_length", hidden_size // num_heads))
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if int(metadata.get(key, head_dim)) != head_dim:
            raise ConfigError(
                f"{metadata.path}: {key} = {metadata.get(key)}, only the head size {head_dim} is supported"
            )
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.need("llama.feed_forward_length")),
        "num_hidden_layers": int(metadata.need("llama.block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.need("llama.context_length")),
        # GGUF keeps it in float32: 1e-5 comes out as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{metadata.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in names,
        "dtype": dtype,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token_id"] = int(token_id)
    return config


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ConfigError(f"{metadata.path}: llama.rope.scaling.type = {kind!r}, supported are none and linear")
    return {"rope_type": "linear", "factor": float(metadata.need("llama.rope.scaling.factor"))}


def _tokenizer_fields(metadata: _Metadata) -> TokenizerFields:
    model = metadata.need("tokenizer.ggml.model")
    if model != "gpt2":
        raise ConfigError(
            f'{metadata.path}: tokenizer.ggml.model is {model!r}, only byte-level BPE ("gpt2") is supported'
        )

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return None if value is None else int(value)

    return TokenizerFields(
        source=str(metadata.path),
        pre=str(metadata.get("tokenizer.ggml.pre", "gpt-2")),
        tokens=metadata.need("tokenizer.ggml.tokens"),
        token_types=[int(kind) for kind in metadata.need("tokenizer.ggml.token_type")],
        merges=metadata.need("tokenizer.ggml.merges"),
        bos_token_id=token_id("bos"),
        eos_token_id=token_id("eos"),
        unk_token_id=token_id("unknown"),
        pad_token_id=token_id("padding"),
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token"),
        add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _write_weights(
    directory: Path,
    tensors: dict[str, Any],
    names: dict[str, str],
    config: dict[str, Any],
    dtype: torch.dtype,
    progress: Progress | None,
) -> None:
    sizes = {name: int(np.prod(tensor.shape)) * dtype.itemsize for name, tensor in tensors.items()}
    shards = _plan_shards(sizes)
    weight_map: dict[str, str] = {}
    total, done = sum(sizes.values()), 0
    for index, shard in enumerate(shards):
        file_name = _shard_name(index, len(shards))
        loaded: dict[str, torch.Tensor] = {}
        for name in shard:
            values = _dequantise(name, tensors[name])
            values = _unpermute(name, values, config)
            # A copy: a tensor that needed no change is a view of the mapped file, which torch refuses to wrap.
            loaded[names[name]] = torch.from_numpy(np.array(values)).to(dtype)
            weight_map[names[name]] = file_name
            done += sizes[name]
            if progress is not None:
                progress(done, total)
        save_file(loaded, directory / file_name, {"format": "pt"})
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index_json)


def _plan_shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names in file order, cut where the next tensor would take a shard over MAX_SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    room = MAX_SHARD_BYTES
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = MAX_SHARD_BYTES
        shards[-1].append(name)
        room -= size
    return shards


def _shard_name(index: int, num_shards: int) -> str:
    return "model.safetensors" if num_shards == 1 else f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def _dequantise(name: str, tensor: Any) -> npt.NDArray[np.float32]:
    try:
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(f"tensor {name} has the type {tensor.tensor_type.name}: {error}") from error
    return values.astype(np.float32, copy=False)


def _unpermute(name: str, values: npt.NDArray[np.float32], config: dict[str, Any]) -> npt.NDArray[np.float32]:
    """GGUF stores the rows of a q or k head as (x0, y0, x1, y1, ...), Hugging Face as (x0, x1, ..., y0, y1, ...)."""
    kind = name.split(".")[-2]
    if kind not in ("attn_q", "attn_k"):
        return values
    num_heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
    pairs = values.reshape(num_heads, config["head_dim"] // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _make_readable(directory: Path) -> None:
    """Temporary directories and safetensors are made for their owner only; a model is as public as its source."""
    directory.chmod(0o755)
    for path in directory.iterdir():
        path.chmod(0o644)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
