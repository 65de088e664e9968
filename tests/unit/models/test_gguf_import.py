import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine import gguf_import
from engine.errors import CheckpointError, ConfigError
from engine.gguf_import import import_gguf
from engine.model_config import load_model_config
from engine.models.llama import load_llama
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import make_tiny_model

TEXTS = [
    "What is the capital of France? The capital of France is Paris.",
    "<s><|im_start|>user\nIn 1969, 600 million watched.<|im_end|>\n",
    "Naïve 漢字 👩‍💻 \t tabs,  two spaces 12  34\r\n\r\nend ",
    "",
]


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "model", tie=False)


def test_weights_come_back_as_they_were(tmp_path, model):
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out", dtype="float32")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("options", [{"tie": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 32}])
def test_config_comes_back_as_it_was(tmp_path, options):
    model = make_tiny_model(tmp_path / "model", **options)
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out", dtype="float32")
    before, after = load_model_config(model), load_model_config(out)
    # GGUF has one end-of-sequence id.
    assert after.eos_token_ids == (2,)
    assert [getattr(before, name) for name in before.__slots__ if name != "eos_token_ids"] == [
        getattr(after, name) for name in after.__slots__ if name != "eos_token_ids"
    ]
    load_llama(out, after, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantised_weights_are_dequantised_then_put_in_order(tmp_path, kind):
    model = make_tiny_model(tmp_path / "model", tie=False)
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf", quantise=kind), tmp_path / "out", dtype="float32")
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    for name, tensor in before.items():
        tolerance = 0 if tensor.ndim == 1 else 0.01 if kind == gguf.GGMLQuantizationType.Q8_0 else 0.12
        assert (after[name] - tensor).norm() <= tolerance * tensor.norm(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_stored_in_the_dtype_asked_for(tmp_path, model, dtype):
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {getattr(torch, dtype)}
    assert load_model_config(out).checkpoint_dtype == dtype


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_comes_back_as_it_was(tmp_path, model, text):
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out")
    before = Tokenizer.from_file(str(model / "tokenizer.json"))
    after = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert after.encode(text).ids == before.encode(text).ids
    ids = before.encode(text, add_special_tokens=False).ids
    assert after.decode(ids, skip_special_tokens=False) == before.decode(ids, skip_special_tokens=False) == text


def test_template_and_special_tokens_are_kept(tmp_path, model):
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out")
    before = json.loads((model / "tokenizer_config.json").read_text())
    after = json.loads((out / "tokenizer_config.json").read_text())
    assert after["chat_template"] == before["chat_template"]
    assert (after["bos_token"], after["eos_token"]) == ("<s>", "</s>")
    assert after["added_tokens_decoder"]["3"]["content"] == "<|im_start|>"


def test_a_tokenizer_that_adds_bos_goes_on_doing_so(tmp_path, model):
    path = write_gguf(model, tmp_path / "m.gguf", keys={"tokenizer.ggml.add_bos_token": True})
    out = import_gguf(path, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = tokenizer.encode("baton", add_special_tokens=False).ids
    assert tokenizer.encode("baton").ids == [1, *ids]
    assert json.loads((out / "tokenizer_config.json").read_text())["add_bos_token"] is True


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "it's 1969  x", ["it", "'s", "Ġ", "1", "9", "6", "9", "Ġ", "Ġx"]),
        ("gpt-2", "it's 1969  x", ["it", "'s", "Ġ1969", "Ġ", "Ġx"]),
        ("llama-bpe", "it's 1969  x", ["it", "'s", "Ġ", "196", "9", "Ġ", "Ġx"]),
        ("qwen2", "it's 1969  x", ["it", "'s", "Ġ", "1", "9", "6", "9", "Ġ", "Ġx"]),
    ],
)
def test_known_pre_tokenizers_split_as_theirs_do(tmp_path, model, pre, text, pieces):
    path = write_gguf(model, tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": pre})
    tokenizer = Tokenizer.from_file(str(import_gguf(path, tmp_path / "out") / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"architecture": "qwen2"}, "general.architecture is 'qwen2'"),
        ({"keys": {"tokenizer.ggml.pre": "tekken"}}, "tokenizer.ggml.pre = 'tekken'"),
        ({"keys": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model is 'llama'"),
        ({"keys": {"llama.expert_count": 8}}, "llama.expert_count = 8"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type = 'yarn'"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count = 8"),
        ({"keys": {"tokenizer.ggml.padding_token_id": 99999}}, "pad token id 99999"),
        ({"extra_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs.weight"),
        (
            {"extra_tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
            "blk.0.attn_q_norm.weight",
        ),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(tmp_path, model, options, named):
    path = write_gguf(model, tmp_path / "m.gguf", **options)
    with pytest.raises(ConfigError) as caught:
        import_gguf(path, tmp_path / "out")
    assert named in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_linear_rope_scaling_is_kept(tmp_path, model):
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf", keys=keys), tmp_path / "out")
    rope = load_model_config(out).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def test_a_large_model_is_cut_into_shards(tmp_path, model, monkeypatch):
    monkeypatch.setattr(gguf_import, "MAX_SHARD_BYTES", 100_000)
    out = import_gguf(write_gguf(model, tmp_path / "m.gguf"), tmp_path / "out", dtype="float32")
    assert len(list(out.glob("model-*.safetensors"))) > 2
    imported = load_llama(out, load_model_config(out), dtype=torch.float32, device=torch.device("cpu"))
    assert torch.equal(imported.lm_head, load_file(model / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        import_gguf(path, tmp_path / "out")


def test_a_gguf_cut_short_leaves_nothing_behind(tmp_path, model):
    path = write_gguf(model, tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError):
        import_gguf(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_an_import_that_fails_half_way_leaves_nothing_behind(tmp_path, model):
    def fail(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    path = write_gguf(model, tmp_path / "m.gguf")
    with pytest.raises(KeyboardInterrupt):
        import_gguf(path, tmp_path / "out", progress=fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_nothing_is_overwritten(tmp_path, model):
    path = write_gguf(model, tmp_path / "m.gguf")
    import_gguf(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="already exists"):
        import_gguf(path, tmp_path / "out")


def test_progress_and_file_modes(tmp_path, model):
    reports: list[tuple[int, int]] = []
    path = write_gguf(model, tmp_path / "m.gguf")
    out = import_gguf(path, tmp_path / "out", progress=lambda done, total: reports.append((done, total)))
    assert reports[-1][0] == reports[-1][1] > 0
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}
    assert out.stat().st_mode & 0o777 == 0o755
