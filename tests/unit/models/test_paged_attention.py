import random
from functools import partial

import pytest
import torch

from engine.runner import StepBatch
from tests.support import llama_reference
from tests.support.llama_reference import (
    KERNELS,
    chunk_logits,
    load_reference,
    reference_logits,
    scheduled,
)
from tests.support.tiny_model import make_tiny_model

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(4)
    return [[rng.randrange(384) for _ in range(NUM_TOKENS)] for _ in range(6)]


@pytest.fixture(scope="module")
def expected(directory, prompts):
    model = load_reference(directory)
    return [reference_logits(model, prompt) for prompt in prompts]


@pytest.fixture(params=KERNELS)
def make_runner(request):
    return partial(llama_reference.make_runner, kernels=request.param)


def close(actual, wanted):
    return (actual - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 33, NUM_TOKENS])
def test_chunks_and_blocks_of_any_size_give_the_same_logits(
    make_runner, directory, prompts, expected, block_size, chunk
):
    num_blocks = -(-NUM_TOKENS // block_size) + 3
    table = random.Random(1).sample(range(num_blocks), num_blocks)
    runner = make_runner(directory, num_blocks=num_blocks, block_size=block_size)
    assert close(chunk_logits(runner, prompts[0], chunk, table, block_size), expected[0][-1])


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_mixed_batch_gives_every_sequence_its_own_logits(make_runner, directory, prompts, expected, block_size):
    """Decodes of very different lengths, a first chunk, a later chunk and a one-token prompt in one step."""
    blocks_each = -(-NUM_TOKENS // block_size)
    num_blocks = blocks_each * len(prompts)
    ids = random.Random(2).sample(range(num_blocks), num_blocks)
    tables = [ids[i * blocks_each : (i + 1) * blocks_each] for i in range(len(prompts))]
    runner = make_runner(directory, num_blocks=num_blocks, block_size=block_size)
    # (tokens already cached, tokens of this step)
    parts = [(40, 1), (0, 30), (3, 1), (25, 20), (0, 1), (59, 1)]
    for prompt, table, (cached, _) in zip(prompts, tables, parts, strict=True):
        if cached:
            runner.logits(StepBatch([scheduled(prompt[:cached], 0, table)], block_size))
    seqs = [
        scheduled(prompt[cached : cached + count], cached, table)
        for prompt, table, (cached, count) in zip(prompts, tables, parts, strict=True)
    ]
    logits = runner.logits(StepBatch(seqs, block_size))
    for row, wanted, (cached, count) in zip(logits, expected, parts, strict=True):
        assert close(row, wanted[cached + count - 1])


def test_only_sequences_that_sample_get_logits_in_the_order_of_the_batch(make_runner, directory, prompts, expected):
    runner = make_runner(directory)
    seqs = [
        scheduled(prompts[0][:20], 0, [0, 1]),
        scheduled(prompts[1][:1], 0, [2]),
        scheduled(prompts[2][:9], 0, [3], sample=False),
        scheduled(prompts[3][:5], 0, [4]),
    ]
    logits = runner.logits(StepBatch(seqs, 16))
    assert logits.shape == (3, 384)
    for row, (prompt, position) in zip(logits, [(0, 19), (1, 0), (3, 4)], strict=True):
        assert close(row, expected[prompt][position])


def test_a_batch_that_samples_nothing_writes_its_kv_all_the_same(make_runner, directory, prompts, expected):
    runner = make_runner(directory)
    first = runner.logits(StepBatch([scheduled(prompts[0][:30], 0, [5, 6], sample=False)], 16))
    assert first.shape == (0, 384)
    logits = runner.logits(StepBatch([scheduled(prompts[0][30:31], 30, [5, 6])], 16))
    assert close(logits[0], expected[0][30])


def test_neighbours_do_not_change_a_decode(make_runner, directory, prompts):
    """Alone, and beside longer sequences that force padding on it."""

    def decode(num_neighbours):
        runner = make_runner(directory)
        tables = [[2 * i, 2 * i + 1] for i in range(num_neighbours + 1)]
        for i in range(num_neighbours + 1):
            cached = 9 if i == 0 else 17
            runner.logits(StepBatch([scheduled(prompts[i][:cached], 0, tables[i])], 16))
        seqs = [scheduled([prompts[i][20]], 9 if i == 0 else 17, tables[i]) for i in range(num_neighbours + 1)]
        return runner.logits(StepBatch(seqs, 16))[0]

    assert close(decode(0), decode(4))


def test_blocks_past_the_context_and_stale_kv_are_never_read(make_runner, directory, prompts, expected):
    runner = make_runner(directory)
    # Fill blocks with the KV of another prompt, then use them again, with more blocks than needed.
    runner.logits(StepBatch([scheduled(prompts[1], 0, [0, 1, 2, 3])], 16))
    runner.logits(StepBatch([scheduled(prompts[0][:18], 0, [2, 0, 3, 1])], 16))
    logits = runner.logits(StepBatch([scheduled([prompts[0][18]], 18, [2, 0, 3, 1])], 16))
    assert close(logits[0], expected[0][18])


def test_many_sequences_are_cut_into_several_groups(make_runner, directory, prompts, expected, monkeypatch):
    monkeypatch.setattr("engine.attention._GROUP_TOKENS_CPU", 64)
    runner = make_runner(directory)
    tables = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(6)]
    for i in range(6):
        runner.logits(StepBatch([scheduled(prompts[i][: 5 + 8 * i], 0, tables[i])], 16))
    seqs = [scheduled([prompts[i][5 + 8 * i]], 5 + 8 * i, tables[i]) for i in range(6)]
    logits = runner.logits(StepBatch(seqs, 16))
    for i in range(6):
        assert close(logits[i], expected[i][5 + 8 * i])


def test_a_batch_of_another_block_size_is_a_bug(make_runner, directory, prompts):
    runner = make_runner(directory, block_size=16)
    with pytest.raises(AssertionError):
        runner.logits(StepBatch([scheduled(prompts[0][:3], 0, [0])], 8))


def test_inference_leaves_no_graph(make_runner, directory, prompts):
    logits = make_runner(directory).logits(StepBatch([scheduled(prompts[0][:3], 0, [0])], 16))
    assert logits.is_inference()
    assert not torch.is_grad_enabled() or logits.grad_fn is None
