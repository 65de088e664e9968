"""Write a model directory as a GGUF file, the way llama.cpp's converter does: the inverse of engine.gguf_import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    directory: Path,
    path: Path,
    *,
    architecture: str = "llama",
    quantise: gguf.GGMLQuantizationType | None = None,
    keys: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """`keys` adds strings, integers and floats to the metadata, or replaces what is written by default."""
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    overrides = dict(keys or {})
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, directory, tokenizer, config, overrides)
    for key, value in overrides.items():
        kinds = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            int: writer.add_uint32,
        }
        kinds[type(value)](key, value)
    for name, tensor in load_file(directory / "model.safetensors").items():
        values = _permute(name, tensor.float().numpy(), config)
        if quantise is not None and values.ndim == 2:
            writer.add_tensor(_gguf_name(name), gguf.quantize(values, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(_gguf_name(name), values)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(
    writer: gguf.GGUFWriter,
    directory: Path,
    tokenizer: dict[str, Any],
    config: dict[str, Any],
    overrides: dict[str, Any],
) -> None:
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model(overrides.pop("tokenizer.ggml.model", "gpt2"))
    writer.add_tokenizer_pre(overrides.pop("tokenizer.ggml.pre", "smollm"))
    writer.add_token_list(tokens)
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])


def _gguf_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.{kind}"


def _permute(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """As `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    if "q_proj" in name:
        num_heads = config["num_attention_heads"]
    elif "k_proj" in name:
        num_heads = config["num_key_value_heads"]
    else:
        return values
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
