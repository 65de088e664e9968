import json
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.model_config import load_model_config, num_blocks_for

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(directory: Path, name: str = "config.json", **fields: object) -> Path:
    values = {**BASE, **fields} if name == "config.json" else fields
    (directory / name).write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("fields", "head_dim"), [({}, 16), ({"head_dim": None}, 16), ({"head_dim": 32}, 32), ({"head_dim": 8}, 8)]
)
def test_stated_head_dim_wins_over_the_derived_one(tmp_path, fields, head_dim):
    config = load_model_config(write(tmp_path, **fields))
    assert config.head_dim == head_dim
    assert config.kv_bytes_per_token("float32") == 2 * 2 * 2 * head_dim * 4
    assert config.kv_bytes_per_token("bfloat16") == 2 * 2 * 2 * head_dim * 2


def test_absent_kv_heads_means_one_for_each_head(tmp_path):
    assert load_model_config(write(tmp_path, num_key_value_heads=None)).num_kv_heads == 4


def test_defaults_are_those_of_transformers(tmp_path):
    from transformers import LlamaConfig

    config, reference = load_model_config(write(tmp_path, rms_norm_eps=None)), LlamaConfig()
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert (config.attention_bias, config.mlp_bias) == (reference.attention_bias, reference.mlp_bias)


def test_rope_old_and_new_spelling_say_the_same(tmp_path):
    old = load_model_config(write(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3)).rope
    new = load_model_config(write(tmp_path, rope_parameters={"rope_theta": 5e5, **LLAMA3})).rope
    assert old == new
    assert (old.kind, old.theta, old.factor, old.original_max_position_embeddings) == ("llama3", 5e5, 8.0, 64)


def test_rope_type_may_be_called_type(tmp_path):
    rope = load_model_config(write(tmp_path, rope_scaling={"type": "linear", "factor": 2})).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "mistral"}, "mistral"),
        ({"architectures": None, "model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor = -1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"hidden_size": 66}, "hidden_size = 66"),
        ({"head_dim": 15}, "15"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"eos_token_id": 100}, "eos_token_id = 100"),
        ({"bos_token_id": -1}, "bos_token_id = -1"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, fields, named):
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load_model_config(write(tmp_path, **fields))
    assert named in str(caught.value)


def test_unreadable_directories_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        load_model_config(tmp_path)


def test_end_of_sequence_ids_are_joined_from_every_file(tmp_path):
    write(tmp_path, eos_token_id=[7, 9])
    write(tmp_path, "generation_config.json", eos_token_id=8)
    write(tmp_path, "tokenizer_config.json", eos_token={"content": "<end>", "lstrip": False})
    write(tmp_path, "tokenizer.json", added_tokens=[{"id": 5, "content": "<end>"}], model={"vocab": {}})
    assert load_model_config(tmp_path).eos_token_ids == (5, 7, 8, 9)


def test_eos_token_is_looked_up_where_tokenizers_keep_it(tmp_path):
    write(tmp_path)
    write(tmp_path, "tokenizer_config.json", eos_token="<end>")
    write(tmp_path, "tokenizer.json", model={"vocab": {"<end>": 6}})
    assert load_model_config(tmp_path).eos_token_ids == (6,)
    write(tmp_path, "tokenizer_config.json", eos_token="<end>", added_tokens_decoder={"4": {"content": "<end>"}})
    assert load_model_config(tmp_path).eos_token_ids == (4,)


def test_eos_token_that_the_tokenizer_lacks_is_refused(tmp_path):
    write(tmp_path)
    write(tmp_path, "tokenizer_config.json", eos_token="<end>")
    write(tmp_path, "tokenizer.json", model={"vocab": {"a": 6}})
    with pytest.raises(ConfigError, match="'<end>'"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("stated", "setting", "computed"),
    [
        ("bfloat16", "auto", "bfloat16"),
        ("float32", "auto", "float32"),
        ("float16", "auto", "float32"),
        (None, "auto", "float32"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_dtype(tmp_path, stated, setting, computed):
    for key in ("dtype", "torch_dtype"):
        assert load_model_config(write(tmp_path, **{key: stated})).resolve_dtype(setting) == computed


def test_unknown_dtype_setting_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'half'"):
        load_model_config(write(tmp_path)).resolve_dtype("half")


def test_a_memory_budget_is_rounded_down_to_whole_blocks(tmp_path):
    config = load_model_config(write(tmp_path))
    block = 16 * config.kv_bytes_per_token("float32")
    assert num_blocks_for(3 * block + block - 1, config, 16, "float32") == 3
    assert num_blocks_for(3 * block, config, 16, "bfloat16") == 6
    with pytest.raises(ConfigError, match="holds no block"):
        num_blocks_for(block - 1, config, 16, "float32")
