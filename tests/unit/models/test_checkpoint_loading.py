import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.model_config import load_model_config
from engine.models.checkpoint import INDEX_NAME
from engine.models.fingerprint import model_fingerprint
from engine.models.llama import load_llama
from tests.support.tiny_model import make_tiny_model, save_shards

CPU = torch.device("cpu")
FILE = "model.safetensors"


def load(directory, dtype=torch.float32, progress=None):
    return load_llama(directory, load_model_config(directory), dtype=dtype, device=CPU, progress=progress)


def edit(directory, **changes):
    """Replace, add or (None) delete tensors of a one-file checkpoint; dots are spelled as two underscores."""
    tensors = load_file(directory / FILE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, directory / FILE)


def test_untied_without_a_head_is_refused_by_name(tmp_path):
    make_tiny_model(tmp_path, tie=False, lm_head_in_file=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(tmp_path)


def test_tied_models_share_one_tensor(tmp_path):
    model = load(make_tiny_model(tmp_path, tie=True))
    assert model.lm_head is model.embed


def test_tied_with_an_equal_head_in_the_file_shares_one_tensor(tmp_path):
    make_tiny_model(tmp_path, tie=True)
    edit(tmp_path, lm_head__weight=load_file(tmp_path / FILE)["model.embed_tokens.weight"].clone())
    model = load(tmp_path)
    assert model.lm_head is model.embed


def test_tied_with_only_a_head_embeds_with_it(tmp_path):
    make_tiny_model(tmp_path, tie=True)
    head = load_file(tmp_path / FILE)["model.embed_tokens.weight"]
    edit(tmp_path, lm_head__weight=head, model__embed_tokens__weight=None)
    model = load(tmp_path)
    assert model.embed is model.lm_head
    assert torch.equal(model.embed, head)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path, name):
    edit(make_tiny_model(tmp_path), **{name.replace(".", "__"): None})
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "vision.patch.weight",
    ],
)
def test_unknown_tensor_is_named(tmp_path, name):
    edit(make_tiny_model(tmp_path), **{name.replace(".", "__"): torch.ones(64)})
    with pytest.raises(CheckpointError, match=f"does not have: {name}"):
        load(tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_known(tmp_path):
    edit(make_tiny_model(tmp_path), model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(tmp_path)


def test_wrong_shape_is_named(tmp_path):
    edit(make_tiny_model(tmp_path), model__norm__weight=torch.ones(63))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[63\].*\[64\]"):
        load(tmp_path)


def test_a_head_dim_that_the_weights_contradict_is_refused(tmp_path):
    make_tiny_model(tmp_path, head_dim=16, config_overrides={"head_dim": 32})
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.weight has shape"):
        load(tmp_path)


def test_integer_weights_are_refused(tmp_path):
    edit(make_tiny_model(tmp_path), model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8"):
        load(tmp_path)


def test_missing_shard_is_named(tmp_path):
    make_tiny_model(tmp_path, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path):
    make_tiny_model(tmp_path)
    (tmp_path / FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors are read"):
        load(tmp_path)


def test_index_that_misplaces_a_tensor_is_refused(tmp_path):
    make_tiny_model(tmp_path, num_shards=2)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = next(
        shard for shard in index["weight_map"].values() if shard != index["weight_map"]["model.norm.weight"]
    )
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("value", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None])
def test_index_cannot_reach_out_of_its_directory(tmp_path, value):
    model = make_tiny_model(tmp_path / "model", num_shards=2)
    index = json.loads((model / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = value
    (model / INDEX_NAME).write_text(json.dumps(index))
    (tmp_path / "outside.safetensors").write_bytes((model / "model-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="no plain file name"):
        load(model)


def test_tensor_in_two_shards_is_refused(tmp_path):
    make_tiny_model(tmp_path, num_shards=2)
    name = "model-00002-of-00002.safetensors"
    twice = load_file(tmp_path / "model-00001-of-00002.safetensors")
    save_file({**load_file(tmp_path / name), **twice}, tmp_path / name)
    with pytest.raises(CheckpointError, match="is in both"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 4,
        struct.pack("<Q", 1 << 62),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 9) + b'{"a": {}}',
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, content):
    make_tiny_model(tmp_path)
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=FILE):
        load(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path):
    make_tiny_model(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[: len(content) - 100])
    with pytest.raises(CheckpointError, match="cut short"):
        load(tmp_path)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_progress_ends_at_the_size_of_all_tensors(tmp_path, num_shards):
    make_tiny_model(tmp_path, tie=False, num_shards=num_shards)
    reports: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: reports.append((done, total)))
    total = sum(t.nbytes for path in tmp_path.glob("*.safetensors") for t in load_file(path).values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_from_any_float_type(tmp_path, stored):
    make_tiny_model(tmp_path, dtype=stored)
    norm = load_file(tmp_path / FILE)["model.norm.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(load(tmp_path, dtype).norm, norm.to(dtype))


def test_fingerprint_is_of_the_content(tmp_path):
    def fingerprint(name, **options):
        directory = make_tiny_model(tmp_path / name, **options)
        return model_fingerprint(directory, load_model_config(directory))

    same = fingerprint("a")
    assert same == fingerprint("b")
    assert same == fingerprint("sharded", num_shards=2)
    different = [
        fingerprint("seed", seed=1),
        fingerprint("theta", rope_theta=5000.0),
        fingerprint("dtype", dtype="bfloat16"),
        fingerprint("eps", config_overrides={"rms_norm_eps": 1e-6}),
        fingerprint("layers", layers=1),
    ]
    assert len({same, *different}) == 1 + len(different)


@pytest.mark.parametrize("where", [0, -1])
def test_fingerprint_sees_one_changed_tensor(tmp_path, where):
    make_tiny_model(tmp_path, hidden=512, heads=8, head_dim=64, intermediate=512, layers=1)
    before = model_fingerprint(tmp_path, load_model_config(tmp_path))
    tensors = load_file(tmp_path / FILE)
    # Larger than what is hashed whole.
    tensors["model.layers.0.self_attn.q_proj.weight"].view(-1)[where] += 1.0
    save_shards(tmp_path, tensors)
    assert model_fingerprint(tmp_path, load_model_config(tmp_path)) != before
