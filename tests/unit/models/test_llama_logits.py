import dataclasses

import pytest
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.model_config import load_model_config
from engine.model_runner import resolve_precision
from engine.runner import ScoreInput, StepBatch
from tests.support.llama_reference import (
    KERNELS,
    all_logits,
    chunk_logits,
    load_reference,
    make_runner,
    reference_logits,
    scheduled,
    skip_without_kernels,
)
from tests.support.tiny_model import make_tiny_model

TOKENS = [1, 3, 77, 200, 150, 33, 260, 9, 9, 120, 45, 301, 18, 7, 222, 64, 5, 310, 99, 141, 12, 250, 83]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "grouped_query": {},
    "one_kv_head": {"kv_heads": 1},
    "multi_head": {"kv_heads": 4},
    "explicit_head_dim": {"head_dim": 32},
    "null_head_dim": {"head_dim": None},
    "untied": {"tie": False},
    "two_shards": {"num_shards": 2, "tie": False},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "every_bias": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_scaling": LLAMA3},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "rope_parameters": {"config_overrides": {"rope_theta": None, "rope_parameters": {"rope_theta": 777.0, **LLAMA3}}},
    "other_theta": {"rope_theta": 500.0},
    "bfloat16_file": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path, name, kernels):
    directory = make_tiny_model(tmp_path, **VARIANTS[name])
    expected = reference_logits(load_reference(directory), TOKENS)
    decoded = all_logits(make_runner(directory, kernels=kernels), TOKENS)
    assert (decoded - expected).abs().max() < 1e-4
    prefilled = chunk_logits(make_runner(directory, kernels=kernels), TOKENS, len(TOKENS), [3, 1], 16)
    assert (prefilled - expected[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("same", [True, False])
def test_tied_with_a_head_in_the_file_does_as_transformers_does(tmp_path, same, kernels):
    directory = make_tiny_model(tmp_path, tie=True)
    tensors = load_file(directory / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embed.clone() if same else embed.flip(0).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    expected = reference_logits(load_reference(directory), TOKENS)
    assert (all_logits(make_runner(directory, kernels=kernels), TOKENS) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_bfloat16_stays_close_to_float32(tmp_path, kernels):
    directory = make_tiny_model(tmp_path, dtype="bfloat16")
    expected = reference_logits(load_reference(directory), TOKENS)
    logits = all_logits(make_runner(directory, dtype="bfloat16", kernels=kernels), TOKENS)
    assert (logits.float() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("variant", ["grouped_query", "untied", "every_bias"])
def test_int8_stays_close_to_float32(tmp_path, variant):
    directory = make_tiny_model(tmp_path, **VARIANTS[variant])
    expected = reference_logits(load_reference(directory), TOKENS)
    runner = make_runner(directory, kernels="native", quantization="int8")
    decoded = all_logits(runner, TOKENS)
    assert 0 < (decoded - expected).norm() / expected.norm() < 0.1
    # The products of a row do not depend on its neighbours, so only attention rounds otherwise here.
    prefilled = chunk_logits(make_runner(directory, kernels="native", quantization="int8"), TOKENS, 7, [3, 1], 16)
    assert (prefilled - decoded[-1]).norm() / expected[-1].norm() < 0.05


def test_quantised_weights_are_refused_without_native_kernels(tmp_path):
    with pytest.raises(ConfigError, match="int8 needs the native CPU kernels"):
        make_runner(make_tiny_model(tmp_path), kernels="torch", quantization="int8")


@pytest.mark.parametrize(
    ("dtype", "kernels", "wanted"),
    [
        ("auto", "native", "int8"),
        ("auto", "torch", "float32"),
        ("float32", "native", "float32"),
        ("bfloat16", "native", "bfloat16"),
    ],
)
def test_weights_are_quantised_only_where_no_dtype_was_asked_for(tmp_path, dtype, kernels, wanted):
    if kernels == "native":
        skip_without_kernels()
    config = load_model_config(make_tiny_model(tmp_path))
    assert resolve_precision(config, dtype=dtype, device="cpu", kernels=kernels).weight_format == wanted


def test_outputs_of_the_tiny_model_are_far_from_ties(tmp_path):
    """Token-by-token comparison means nothing where rounding could decide."""
    logits = reference_logits(load_reference(make_tiny_model(tmp_path)), TOKENS)
    best = logits.topk(2, dim=-1).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    assert len(set(logits.argmax(-1).tolist())) > len(TOKENS) // 2


def test_the_same_arguments_make_the_same_files(tmp_path):
    one, two = make_tiny_model(tmp_path / "one"), make_tiny_model(tmp_path / "two")
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes(), path.name


@pytest.mark.parametrize("kernels", KERNELS)
def test_scored_rows_come_after_sampled_ones_whatever_the_layout_of_the_step(tmp_path, kernels):
    """A decode, a scored chunk that samples, and a scored chunk that does not, in one step."""
    directory = make_tiny_model(tmp_path)
    expected = reference_logits(load_reference(directory), TOKENS)
    runner = make_runner(directory, kernels=kernels)
    decode, whole, part = TOKENS[:9], TOKENS, TOKENS[:20]
    runner.logits(StepBatch([scheduled(decode[:8], 0, [0])], 16))
    batch = StepBatch(
        [
            dataclasses.replace(scheduled(part, 0, [1, 2], sample=False), score=ScoreInput(0, part[1:], 0)),
            dataclasses.replace(scheduled(whole, 0, [3, 4]), score=ScoreInput(3, whole[4:], 0)),
            scheduled(decode[8:], 8, [0]),
        ],
        16,
    )
    rows = runner.logits(batch)
    wanted = [len(whole) - 1, 8, *range(len(part) - 1), *range(3, len(whole) - 1)]
    assert rows.shape[0] == len(wanted)
    assert (rows - expected[wanted]).abs().max() < 1e-4
