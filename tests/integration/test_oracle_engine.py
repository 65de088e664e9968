"""Greedy output of the whole engine, token by token, against transformers, for any block size and chunk budget."""

import random

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import (
    AddRequest,
    EngineRequest,
    Finished,
    KvRead,
    KvWritten,
    PrefillDone,
    ReadKv,
    Release,
    Reserve,
    Reserved,
    StartDecode,
    TokenOut,
    WriteKv,
)
from engine.model_runner import load_runner
from engine.sampling_params import SamplingParams
from tests.support.llama_reference import load_reference, reference_greedy
from tests.support.tiny_model import make_tiny_model

VOCAB = 384
NUM_OUTPUT = 24
MAX_STEPS = 2000


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=3)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    lengths = (1, 2, 15, 16, 17, 33, 90)
    own = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [*own, shared, shared + own[2], shared + own[3]]


@pytest.fixture(scope="module")
def expected(directory, prompts):
    model = load_reference(directory)
    return [reference_greedy(model, prompt, NUM_OUTPUT) for prompt in prompts]


def make_engine(directory, *, block_size=16, num_blocks=None, max_batch_tokens=64, max_num_seqs=16):
    config = EngineConfig(
        num_blocks=num_blocks or 2048 // block_size,
        block_size=block_size,
        max_model_len=256,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
    )
    return Engine(config, load_runner(directory, dtype="float32", device="cpu", config=config), VOCAB)


def request(name, prompt, **options):
    sampling = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
    return EngineRequest(name, tuple(prompt), sampling, **options)


def run(engine, events=None):
    """Step until idle; every event."""
    events = list(events or [])
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            return events
        events += engine.step(lambda: 0.0)
    raise AssertionError(f"not idle after {MAX_STEPS} steps")


def outputs(events, num_requests):
    tokens = [[] for _ in range(num_requests)]
    for event in events:
        if isinstance(event, TokenOut):
            assert event.index == len(tokens[int(event.request_id)])
            tokens[int(event.request_id)].append(event.token_id)
    return tokens


def generate(engine, prompts):
    for i, prompt in enumerate(prompts):
        assert engine.handle(AddRequest(request(str(i), prompt)), 0.0) == []
    events = run(engine)
    assert {event.reason for event in events if isinstance(event, Finished)} == {"length"}
    engine.check_integrity()
    assert engine.is_empty()
    return outputs(events, len(prompts))


@pytest.mark.parametrize("block_size", [1, 16, 32])
@pytest.mark.parametrize("max_batch_tokens", [16, 50, 512])
def test_batched_output_equals_transformers(directory, prompts, expected, block_size, max_batch_tokens):
    engine = make_engine(directory, block_size=block_size, max_batch_tokens=max_batch_tokens)
    assert generate(engine, prompts) == expected


def test_prefix_hits_change_nothing(directory, prompts, expected):
    engine = make_engine(directory)
    assert generate(engine, prompts) == expected
    assert generate(engine, prompts) == expected


def test_preempted_requests_go_on_where_they_were(directory, prompts, expected):
    engine = make_engine(directory, block_size=4, num_blocks=40, max_num_seqs=8)
    for i, prompt in enumerate(prompts):
        assert engine.handle(AddRequest(request(str(i), prompt)), 0.0) == []
    events = run(engine)
    assert outputs(events, len(prompts)) == expected
    assert sum(event.stats.num_preemptions for event in events if isinstance(event, Finished)) > 0


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 16), (16, 32), (1, 16), (32, 1)])
def test_kv_shipped_between_engines_continues_the_same(directory, prompts, expected, prefill_size, decode_size):
    prefill = make_engine(directory, block_size=prefill_size)
    decode = make_engine(directory, block_size=decode_size)
    results = []
    for prompt in prompts:
        events = prefill.handle(AddRequest(request("0", prompt, prefill_only=True)), 0.0)
        events = run(prefill, events)
        assert any(isinstance(event, PrefillDone) for event in events)
        (first,) = [event.token_id for event in events if isinstance(event, TokenOut)]
        (reserved,) = decode.handle(Reserve(request("0", prompt)), 0.0)
        assert isinstance(reserved, Reserved)
        start, num_tokens = reserved.num_cached_tokens, len(prompt) - reserved.num_cached_tokens
        buffer = np.empty(num_tokens * 2 * 3 * 2 * 16 * 4, np.uint8)
        assert prefill.handle(ReadKv("0", start, num_tokens, buffer), 0.0) == [KvRead("0", start, num_tokens, True)]
        prefill.handle(Release("0"), 0.0)
        assert decode.handle(WriteKv("0", start, num_tokens, buffer), 0.0) == [KvWritten("0", start, num_tokens, True)]
        started = decode.handle(StartDecode("0", first), 0.0)
        events = run(decode, started)
        results.append([first, *(e.token_id for e in events if isinstance(e, TokenOut) and e.index > 0)])
    assert results == expected
    assert prefill.is_empty()
    assert decode.is_empty()
