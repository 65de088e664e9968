"""The disaggregated pair says what one plain transformers process says, token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from services.model_store import ensure_default_model
from tests.support.cluster import Cluster, running
from tests.support.llama_reference import load_reference, reference_greedy, reference_logits
from tests.support.tiny_model import make_tiny_model

BLOCK, CHUNK, NUM_OUTPUT = 16, 64, 12
BORDERS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 127, 128, 129, 191, 192, 193)
SIZES = [
    "--block-size",
    str(BLOCK),
    "--max-batch-tokens",
    str(CHUNK),
    "--max-num-seqs",
    "16",
    "--dtype",
    "float32",
]

pytestmark = pytest.mark.slow


def prompts(vocab_size: int, *, seed: int = 1) -> list[list[int]]:
    """One a border length, each of its own token ids, so that none hits another's prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(length)] for length in BORDERS]


@pytest.fixture(scope="module")
def pair(default_model: Path) -> Iterator[Cluster]:
    flags = [*SIZES, "--num-blocks", "400"]
    with running(
        default_model,
        ["prefill", "decode"],
        worker_flags={"prefill": flags, "decode": flags},
        gateway_flags=["--local-prefill-max-tokens", "0"],
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def default_model() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def expected(default_model: Path) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, output ids, log probability of each) by the oracle."""
    torch.set_num_threads(1)
    model = load_reference(default_model)
    cases = []
    for prompt in prompts(model.config.vocab_size):
        output = reference_greedy(model, prompt, NUM_OUTPUT)
        logprobs = reference_logits(model, [*prompt, *output]).log_softmax(-1)
        at = range(len(prompt) - 1, len(prompt) - 1 + NUM_OUTPUT)
        cases.append((prompt, output, [float(logprobs[i, token]) for i, token in zip(at, output, strict=True)]))
    return cases


def ask(cluster: Cluster, prompt: list[int], **fields: Any) -> dict[str, Any]:
    defaults = {"max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    answer: dict[str, Any] = cluster.complete(prompt, **defaults | fields)
    return answer


def check(tokenizer: Tokenizer, answer: dict[str, Any], output: list[int], logprobs: list[float]) -> None:
    choice = answer["choices"][0]
    assert choice["text"] == tokenizer.decode(output, skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == NUM_OUTPUT
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)


def test_alone_each_prompt_equals_the_oracle(
    pair: Cluster, default_model: Path, expected: list[tuple[list[int], list[int], list[float]]]
) -> None:
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    before = pair.of_role("decode")[0].ledger()["receiver"]
    for prompt, output, logprobs in expected:
        check(tokenizer, ask(pair, prompt), output, logprobs)
    pair.assert_idle()
    after = pair.of_role("decode")[0].ledger()["receiver"]
    assert after["committed"] - before["committed"] == len(expected), "every prompt came over the fabric"


def test_eight_at_once_each_equals_the_oracle(
    pair: Cluster, default_model: Path, expected: list[tuple[list[int], list[int], list[float]]]
) -> None:
    """Sent a second time, so leading blocks are hits on both sides; and once more with none."""
    tokenizer = Tokenizer.from_file(str(default_model / "tokenizer.json"))
    with ThreadPoolExecutor(8) as pool:
        for answer, (_, output, logprobs) in zip(
            pool.map(lambda case: ask(pair, case[0]), expected), expected, strict=True
        ):
            check(tokenizer, answer, output, logprobs)
    pair.assert_idle()


def test_a_repeated_prompt_is_a_prefix_hit_and_is_reported(pair: Cluster) -> None:
    prompt = prompts(40_000, seed=9)[-1]
    first, second = ask(pair, prompt), ask(pair, prompt)
    assert first["choices"] == second["choices"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, (len(prompt) - 1) // BLOCK * BLOCK]


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 42, "presence_penalty": 0.5, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("shape", "prefill_block", "decode_block"),
    [
        ({"kv_heads": 1}, 16, 16),
        ({"kv_heads": 2, "head_dim": 32}, 1, 16),
        ({"kv_heads": 4, "head_dim": None}, 32, 1),
        ({"kv_heads": 1, "head_dim": 8, "tie": False}, 16, 32),
    ],
)
def test_odd_shapes_and_block_sizes_equal_the_oracle_and_the_aggregated_mode(
    tmp_path: Path, shape: dict[str, Any], prefill_block: int, decode_block: int
) -> None:
    model = make_tiny_model(tmp_path / "tiny", **shape)
    reference = load_reference(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    flags = ["--max-batch-tokens", "48", "--max-num-seqs", "8", "--dtype", "float32"]

    def sized(block: int) -> list[str]:
        return [*flags, "--block-size", str(block), "--num-blocks", str(1024 // block)]

    asked = prompts(reference.config.vocab_size)
    with running(
        model,
        ["prefill", "decode"],
        worker_flags={"prefill": sized(prefill_block), "decode": sized(decode_block)},
        gateway_flags=["--local-prefill-max-tokens", "0"],
    ) as cluster:
        for prompt in asked:
            output = reference_greedy(reference, prompt, NUM_OUTPUT)
            # A character that the last token leaves unfinished is not part of an answer.
            text = tokenizer.decode(output, skip_special_tokens=True).rstrip("\ufffd")
            choice = ask(cluster, prompt)["choices"][0]
            assert choice["text"].rstrip("\ufffd") == text
            logprobs = reference_logits(reference, [*prompt, *output]).log_softmax(-1)
            chosen = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(output)]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(chosen, abs=1e-3)
        with ThreadPoolExecutor(8) as pool:
            sampled = list(pool.map(lambda prompt: ask(cluster, prompt, **SAMPLED), asked))
        cluster.assert_idle()
    with running(model, ["both"], worker_flags={"both": sized(16)}) as cluster:
        for prompt, answer in zip(asked, sampled, strict=True):
            assert ask(cluster, prompt, **SAMPLED)["choices"][0]["text"] == answer["choices"][0]["text"]
        cluster.assert_idle()
