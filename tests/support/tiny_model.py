"""A complete Hugging Face model directory in miniature: random weights, a real byte-level BPE tokenizer, a template.

Made in a fraction of a second and the same for the same arguments, so that a test can compare two processes that
each made their own. Weights are large enough for outputs to be far from ties.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, IM_START, IM_END, UNK = "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>"
SPECIAL_TOKENS = (UNK, BOS, EOS, IM_START, IM_END)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = (
    "The baton passes from the first runner to the second without losing a step.",
    "A prompt is computed once; its keys and values travel to the worker that goes on.",
    "What is the capital of France? The capital of France is Paris.",
    "In 1969 two people walked on the moon, and 600 million watched them do it.",
    "Naïve café owners déjà vu: 漢字 and emoji 👩‍💻 are bytes like any other.",
    "def main():\n    return {'answer': 42}\n",
)


def make_tiny_model(
    directory: str | Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 16,
    intermediate: int = 128,
    vocab: int = 384,
    tie: bool = True,
    lm_head_in_file: bool | None = None,
    dtype: str = "float32",
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    num_shards: int = 1,
    max_position_embeddings: int = 512,
    add_bos_token: bool = False,
    config_overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, generation config, weights and tokenizer; returns the directory.

    `lm_head_in_file` None: present exactly if not tied. `head_dim` None is written as null. `config_overrides` is
    laid over config.json last, to make a bad one.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, vocab, add_bos_token)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "tie_word_embeddings": tie,
        "attention_bias": attention_bias,
        "mlp_bias": mlp_bias,
        "dtype": dtype,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        **(config_overrides or {}),
    }
    eos_ids = [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(IM_END)]
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": eos_ids})
    tensors = _random_tensors(
        seed, hidden, layers, heads, kv_heads, head_dim or hidden // heads, intermediate, vocab,
        lm_head=not tie if lm_head_in_file is None else lm_head_in_file,
        attention_bias=attention_bias, mlp_bias=mlp_bias,
    )  # fmt: skip
    save_shards(directory, {n: t.to(getattr(torch, dtype)) for n, t in tensors.items()}, num_shards)
    return directory


def save_shards(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Write `tensors` as one file, or as `num_shards` files dealt round robin and their index."""
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def _random_tensors(
    seed: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int,
    *, lm_head: bool, attention_bias: bool, mlp_bias: bool,
) -> dict[str, torch.Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    q_size, kv_size = heads * head_dim, kv_heads * head_dim
    tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden, std=1.0),
        "model.norm.weight": 1 + normal(hidden, std=0.1),
    }
    if lm_head:
        tensors["lm_head.weight"] = normal(vocab, hidden, std=1.0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = 1 + normal(hidden, std=0.1)
        tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + normal(hidden, std=0.1)
        # The scale of a Xavier initialisation, doubled: attention that is far from uniform.
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_size, hidden, attention_bias),
            ("self_attn.k_proj", kv_size, hidden, attention_bias),
            ("self_attn.v_proj", kv_size, hidden, attention_bias),
            ("self_attn.o_proj", hidden, q_size, attention_bias),
            ("mlp.gate_proj", intermediate, hidden, mlp_bias),
            ("mlp.up_proj", intermediate, hidden, mlp_bias),
            ("mlp.down_proj", hidden, intermediate, mlp_bias),
        ):
            tensors[f"{prefix}{name}.weight"] = normal(rows, columns, std=2.0 * columns**-0.5)
            if bias:
                tensors[f"{prefix}{name}.bias"] = normal(rows, std=1.0)
    return tensors


def _write_tokenizer(directory: Path, vocab: int, add_bos_token: bool) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    if tokenizer.get_vocab_size() > vocab:
        raise ValueError(f"a byte-level vocabulary needs more than {vocab} tokens")
    if add_bos_token:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": IM_END,
            "unk_token": UNK,
            "pad_token": EOS,
            "add_bos_token": add_bos_token,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
