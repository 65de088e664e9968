import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache import KvCache
from engine.model_config import load_model_config
from engine.model_runner import load_runner
from engine.runner import StepBatch
from tests.support.llama_reference import load_reference, make_runner, reference_logits, scheduled
from tests.support.tiny_model import make_tiny_model

TOKENS = list(range(5, 55))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=3, kv_heads=2)


def slots_of(table, num_tokens, block_size):
    positions = np.arange(num_tokens)
    return np.asarray(table)[positions // block_size] * block_size + positions % block_size


def filled(directory, dtype="float32", block_size=16, num_blocks=8):
    config = load_model_config(directory)
    cache = KvCache(config, num_blocks, block_size, dtype, CPU)
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(0)))
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "slots",
    [
        np.arange(20, 60),
        np.array([7]),
        np.array([90, 3, 41, 40, 0]),
        np.concatenate([np.arange(96, 112), np.arange(0, 16), np.arange(32, 37)]),
        np.arange(30, 0, -1),
        np.array([], dtype=np.int64),
    ],
)
def test_read_is_the_canonical_layout(directory, dtype, slots):
    cache = filled(directory, dtype)
    buffer = np.empty(len(slots) * cache.bytes_per_token, np.uint8)
    cache.read(slots, buffer)
    wanted = cache.data[:, :, torch.from_numpy(slots)]
    assert wanted.shape == (3, 2, len(slots), 2, 16)
    assert buffer.tobytes() == wanted.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("scatter", [np.arange(16, 56), np.random.default_rng(0).permutation(128)[:40]])
def test_write_touches_its_slots_only(directory, scatter):
    cache, source = filled(directory), filled(directory)
    source.data.neg_()
    buffer = np.empty(40 * cache.bytes_per_token, np.uint8)
    source.read(np.arange(40), buffer)
    before = cache.data.clone()
    buffer.flags.writeable = False
    cache.write(scatter, buffer)
    untouched = np.setdiff1d(np.arange(128), scatter)
    assert torch.equal(cache.data[:, :, untouched], before[:, :, untouched])
    assert torch.equal(cache.data[:, :, scatter], source.data[:, :, :40])


@pytest.mark.parametrize(("read_size", "write_size"), [(16, 16), (16, 1), (1, 32), (32, 16), (5, 7)])
def test_kv_moved_between_block_sizes_decodes_the_same(directory, read_size, write_size):
    """Prefill in one runner, decode in another, ranges shipped out of order."""
    expected = reference_logits(load_reference(directory), [*TOKENS, 99])
    one = make_runner(directory, block_size=read_size, num_blocks=64)
    two = make_runner(directory, block_size=write_size, num_blocks=64)
    table_one = list(np.random.default_rng(1).permutation(64)[: -(-50 // read_size)])
    table_two = list(np.random.default_rng(2).permutation(64)[: -(-51 // write_size)])
    one.logits(StepBatch([scheduled(TOKENS, 0, table_one)], read_size))
    slots_one, slots_two = slots_of(table_one, 50, read_size), slots_of(table_two, 50, write_size)
    for start, end in ((30, 50), (0, 13), (13, 30)):
        buffer = np.empty((end - start) * one.kv_bytes_per_token, np.uint8)
        one.read_kv(slots_one[start:end], buffer)
        two.write_kv(slots_two[start:end], buffer)
    logits = two.logits(StepBatch([scheduled([99], 50, table_two)], write_size))
    assert (logits[0] - expected[50]).abs().max() < 1e-4


def test_sizes(directory):
    runner = make_runner(directory)
    assert runner.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert make_runner(directory, dtype="bfloat16").kv_bytes_per_token == 2 * 3 * 2 * 16 * 2


@pytest.mark.parametrize("num_bytes", [0, 383, 385 * 2])
def test_a_buffer_of_the_wrong_size_is_a_bug(directory, num_bytes):
    with pytest.raises(AssertionError):
        filled(directory).read(np.arange(2), np.empty(num_bytes, np.uint8))


@pytest.mark.parametrize("slots", [[-1], [128], [0, 4000]])
def test_slots_outside_the_pool_are_a_bug(directory, slots):
    cache = filled(directory)
    with pytest.raises(AssertionError):
        cache.write(np.array(slots), np.zeros(len(slots) * cache.bytes_per_token, np.uint8))


def test_a_pool_that_memory_cannot_hold_is_refused(directory):
    with pytest.raises(ConfigError, match="KV blocks"):
        KvCache(load_model_config(directory), 1 << 40, 16, "float32", CPU)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta", "mps"])
def test_a_device_that_is_not_there_is_refused(directory, device):
    config = EngineConfig(num_blocks=4, max_model_len=64)
    with pytest.raises(ConfigError, match="device"):
        load_runner(directory, dtype="float32", device=device, config=config)


def test_a_context_longer_than_the_model_was_trained_for_is_refused(directory):
    config = EngineConfig(num_blocks=4, max_model_len=513)
    with pytest.raises(ConfigError, match="513"):
        load_runner(directory, dtype="float32", device="cpu", config=config)
