"""What config.json and its neighbours say about a model, checked. Pure; reads files, loads no tensor.

Called once at start-up, on any thread. Only Llama-architecture decoders are computed here, so everything that
would make a checkpoint anything else (another architecture, an unknown kind of rotary scaling, a quantised
checkpoint) raises ConfigError naming the field and its value: a model that loads is a model that is computed
as it was trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import ConfigError
from engine.json_fields import JsonFields

Dtype = Literal["float32", "bfloat16"]
"""What a model is computed and its KV stored in."""
WeightFormat = Literal["float32", "bfloat16", "int8"]
"""What the weights of linear layers are stored in."""
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}

_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
_ROPE_TYPES = ("default", "linear", "llama3")
_ROPE_KEYS = {
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}
# Fields that other Llama-like configurations carry, with the values that mean "not in use".
_OFF: dict[str, tuple[object, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "sliding_window": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "use_qk_norm": (None, False),
    "qk_norm": (None, False),
    "rope_interleaved": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layers": (None,),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The last four fields are read by the types that scale."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-architecture decoder: RMSNorm, rotary embedding, grouped-query attention, gated SiLU MLP."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """On q, k, v and o projections."""
    mlp_bias: bool = False
    checkpoint_dtype: str = "float32"
    """float32, bfloat16 or float16: what config.json states, float32 where it states nothing."""
    eos_token_ids: tuple[int, ...] = ()
    """Every id that config.json, generation_config.json or the tokenizer calls end of sequence, ascending."""
    bos_token_id: int | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, dtype: Dtype) -> int:
        return 2 * self.num_layers * self.kv_size * DTYPE_BYTES[dtype]

    def resolve_dtype(self, dtype: str) -> Dtype:
        """The dtype to compute in for a setting of "auto", "float32" or "bfloat16".

        A float16 checkpoint is computed in float32 under "auto": the only wider type that keeps every value.
        """
        if dtype == "auto":
            return "bfloat16" if self.checkpoint_dtype == "bfloat16" else "float32"
        if dtype == "float32":
            return "float32"
        if dtype == "bfloat16":
            return "bfloat16"
        raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {dtype!r}")


def load_model_config(directory: str | Path) -> ModelConfig:
    """Read a Hugging Face model directory. Raises ConfigError naming the file, the field and the value."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"the model directory {directory} does not exist")
    fields = JsonFields.read(directory / "config.json")
    _refuse_other_architectures(fields)
    num_heads = fields.positive_int("num_attention_heads")
    num_kv_heads = fields.positive_int("num_key_value_heads", num_heads)
    hidden_size = fields.positive_int("hidden_size")
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
    vocab_size = fields.positive_int("vocab_size")
    max_position_embeddings = fields.positive_int("max_position_embeddings")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(fields, hidden_size, num_heads),
        rms_norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        checkpoint_dtype=_checkpoint_dtype(fields),
        eos_token_ids=_eos_token_ids(directory, fields, vocab_size),
        bos_token_id=_bos_token_id(fields, vocab_size),
    )


def _refuse_other_architectures(fields: JsonFields) -> None:
    architectures = fields.get("architectures")
    if architectures is not None and architectures != ["LlamaForCausalLM"]:
        raise fields.error("architectures", "only LlamaForCausalLM is supported")
    model_type = fields.get("model_type")
    if model_type != "llama" and not (model_type is None and architectures):
        raise fields.error("model_type", 'only "llama" is supported')
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.error("hidden_act", 'only "silu" is supported')
    for name, off in _OFF.items():
        if fields.get(name) not in off:
            raise fields.error(name, "is not supported")


def _head_dim(fields: JsonFields, hidden_size: int, num_heads: int) -> int:
    """A stated head_dim wins over hidden_size / num_attention_heads; null is as good as absent."""
    if fields.get("head_dim") is not None:
        head_dim = fields.positive_int("head_dim")
    elif hidden_size % num_heads:
        raise fields.error("hidden_size", f"is no multiple of num_attention_heads ({num_heads})")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(f"{fields.path}: a head_dim of {head_dim} is odd, rotary embedding needs pairs")
    return head_dim


def _rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_theta` + `rope_scaling`, or the single `rope_parameters` of newer files.

    Where both are present `rope_scaling` wins if it says anything, as in transformers.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.section(name)
    for key in rope.values:
        if key not in _ROPE_KEYS:
            raise rope.error(key, f"is not supported in {name}")
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise rope.error("partial_rotary_factor", "is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{fields.path}: {name}.rope_type = {kind!r}: supported are {', '.join(_ROPE_TYPES)}")
    theta = rope.positive_float("rope_theta", fields.positive_float("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.positive_float("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor ({low})")
    original = rope.positive_int("original_max_position_embeddings", max_position_embeddings)
    return RopeConfig(theta, "llama3", factor, low, high, original)


def _checkpoint_dtype(fields: JsonFields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    dtype = fields.get(name)
    if dtype is None:
        return "float32"
    if dtype not in _CHECKPOINT_DTYPES:
        raise fields.error(name, f"supported are {', '.join(_CHECKPOINT_DTYPES)}")
    return str(dtype)


def _eos_token_ids(directory: Path, config: JsonFields, vocab_size: int) -> tuple[int, ...]:
    """Joined, not overridden: models keep the end of a turn in one file and the end of a text in another."""
    ids = set(config.token_ids("eos_token_id", vocab_size))
    generation_path = directory / "generation_config.json"
    if generation_path.exists():
        ids |= set(JsonFields.read(generation_path).token_ids("eos_token_id", vocab_size))
    tokenizer_eos = _tokenizer_eos(directory)
    if tokenizer_eos is not None and tokenizer_eos < vocab_size:
        ids.add(tokenizer_eos)
    return tuple(sorted(ids))


def _bos_token_id(fields: JsonFields, vocab_size: int) -> int | None:
    ids = fields.token_ids("bos_token_id", vocab_size)
    return ids[0] if ids else None


def _tokenizer_eos(directory: Path) -> int | None:
    """Id of tokenizer_config.json's eos_token, None where no tokenizer is there to tell."""
    config_path, tokenizer_path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    if not config_path.exists():
        return None
    config = JsonFields.read(config_path)
    token = config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    for token_id, added in config.section("added_tokens_decoder").values.items():
        if isinstance(added, dict) and added.get("content") == token and token_id.isdigit():
            return int(token_id)
    if not tokenizer_path.exists():
        return None
    found = _token_id(JsonFields.read(tokenizer_path).values, token)
    if found is None:
        raise config.error("eos_token", "is not in tokenizer.json")
    return found


def _token_id(tokenizer: dict[str, Any], token: str) -> int | None:
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == token:
            return int(added["id"])
    vocab = (tokenizer.get("model") or {}).get("vocab")
    found = vocab.get(token) if isinstance(vocab, dict) else None
    return None if found is None else int(found)


def num_blocks_for(budget_bytes: int, config: ModelConfig, block_size: int, dtype: Dtype) -> int:
    """KV blocks that fit in `budget_bytes`. Raises ConfigError where not even one does."""
    block_bytes = block_size * config.kv_bytes_per_token(dtype)
    num_blocks = math.floor(budget_bytes / block_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"a KV cache of {budget_bytes} bytes holds no block: {block_size} tokens take {block_bytes} bytes"
        )
    return num_blocks
