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
    PromptScored,
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
from tests.support.llama_reference import load_reference, reference_greedy, reference_logits
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


def scored(directory, prompt, num_top=3, *, max_batch_tokens=64, before=(), num_blocks=None, **options):
    """Events of one request that wants its prompt scored, after others that leave their blocks in the cache."""
    engine = make_engine(directory, max_batch_tokens=max_batch_tokens, num_blocks=num_blocks)
    for number, earlier in enumerate(before):
        run(engine, engine.handle(AddRequest(request(f"before-{number}", earlier)), 0.0))
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=num_top, prompt_logprobs=num_top)
    spec = EngineRequest("scored", tuple(prompt), sampling, **options)
    return run(engine, engine.handle(AddRequest(spec), 0.0))


@pytest.mark.parametrize("max_batch_tokens", [16, 33, 64])
def test_a_prompt_is_scored_as_transformers_does(directory, prompts, max_batch_tokens):
    model = load_reference(directory)
    for prompt in prompts:
        events = scored(directory, prompt, max_batch_tokens=max_batch_tokens, before=[prompt])
        parts = [event for event in events if isinstance(event, PromptScored)]
        assert [part.start for part in parts] == [
            1 + sum(len(p.logprobs) for p in parts[:i]) for i in range(len(parts))
        ]
        found = [one for part in parts for one in part.logprobs]
        expected = reference_logits(model, prompt).log_softmax(-1)
        assert len(found) == len(prompt) - 1
        for position, one in enumerate(found):
            assert one.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-4)
            values, ids = expected[position].topk(3)
            assert [token for token, _ in one.top] == ids.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)
        first = next(index for index, event in enumerate(events) if isinstance(event, TokenOut))
        assert all(not isinstance(event, PromptScored) for event in events[first:]), "before any output"


def test_scores_change_no_token(directory, prompts, expected):
    for prompt, tokens in zip(prompts, expected, strict=True):
        made = [event.token_id for event in scored(directory, prompt) if isinstance(event, TokenOut)]
        assert made == tokens[:4]


def test_a_prefill_for_another_worker_scores_its_prompt_too(directory, prompts):
    prompt = prompts[-1]
    events = scored(directory, prompt, prefill_only=True, max_batch_tokens=16)
    assert sum(len(event.logprobs) for event in events if isinstance(event, PromptScored)) == len(prompt) - 1


def test_a_worker_that_is_shipped_the_kv_scores_nothing(directory, prompts, expected):
    """Whoever computed the prompt has; here only output follows, and the first token comes with the commit."""
    prompt, tokens = prompts[-1], expected[-1]
    engine = make_engine(directory)
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1)
    spec = EngineRequest("shipped", tuple(prompt), sampling)
    source = make_engine(directory)
    events = run(
        source, source.handle(AddRequest(EngineRequest("shipped", tuple(prompt), sampling, prefill_only=True)), 0.0)
    )
    assert any(isinstance(event, PromptScored) for event in events)
    buffer = np.empty(len(prompt) * source._runner.kv_bytes_per_token, dtype=np.uint8)
    assert source.handle(ReadKv("shipped", 0, len(prompt), buffer), 0.0)[0].ok
    engine.handle(Reserve(spec), 0.0)
    assert engine.handle(WriteKv("shipped", 0, len(prompt), buffer), 0.0)[0].ok
    events = run(engine, engine.handle(StartDecode("shipped", tokens[0]), 0.0))
    assert not any(isinstance(event, PromptScored) for event in events)
    assert [event.token_id for event in events if isinstance(event, TokenOut)] == tokens[1:4]
