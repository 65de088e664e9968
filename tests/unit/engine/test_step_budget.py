"""max_itl_s: steps that others decode in stay within it, whatever prompts arrive, and prompts still end."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.messages import AddRequest, EngineRequest
from engine.sampling_params import SamplingParams
from engine.step_budget import MIN_PREFILL_TOKENS, StepBudget
from tests.support.fake_runner import VOCAB, FakeRunner

DECODE_S, TOKEN_S, CONTEXT_S = 0.008, 0.0004, 2e-7


class TimedRunner(FakeRunner):
    """A step of it takes as long as a model's: by sequences, prompt tokens and the contexts that these attend to."""

    now = 0.0

    def execute(self, batch):
        self.now += DECODE_S
        for seq in batch.seqs:
            num_tokens = len(seq.token_ids)
            if num_tokens > 1:
                self.now += num_tokens * (TOKEN_S + CONTEXT_S * seq.start)
        return super().execute(batch)


def run(max_itl_s, prompts=(1500, 700)):
    """Durations of steps in which an old request decodes, while two long prompts arrive."""
    config = EngineConfig(num_blocks=300, max_model_len=3000, max_batch_tokens=512, max_num_seqs=8, max_itl_s=max_itl_s)
    runner = TimedRunner(config.num_blocks, config.block_size)
    engine = Engine(config, runner, vocab_size=VOCAB)

    def add(name, num_prompt, max_tokens):
        prompt = tuple((ord(name) * 7 + i) % VOCAB for i in range(num_prompt))
        runner.begin(name, prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        assert engine.handle(AddRequest(EngineRequest(name, prompt, params)), runner.now) == []

    add("a", 40, 1000)
    durations = []
    for step in range(400):
        if step == 20:
            for name, num_prompt in zip("bc", prompts, strict=True):
                add(name, num_prompt, 1)
        before = runner.now
        engine.step(lambda: runner.now)
        durations.append(runner.now - before)
        if step > 20 and engine.ledger().requests["running"] == 1:
            return durations[20:]
    raise AssertionError("the prompts did not end")


def test_a_prompt_does_not_stretch_the_steps_that_others_decode_in():
    durations = run(max_itl_s=0.05)
    # What a token costs was learnt from a short prompt; the context it attends to grows.
    assert max(durations) < 0.05 * 1.2
    assert sorted(durations)[len(durations) // 2] > 0.05 * 0.7, "the limit is made use of"


def test_without_a_limit_a_step_is_as_long_as_its_tokens():
    assert max(run(max_itl_s=None)) > 0.2


def test_a_limit_below_the_decodes_own_time_still_lets_prompts_end():
    durations = run(max_itl_s=0.001, prompts=(300, 200))
    assert len(durations) <= -(-500 // MIN_PREFILL_TOKENS) + 2


def test_nothing_is_limited_while_nobody_decodes_or_before_anything_was_measured():
    budget = StepBudget(0.01)
    assert budget.max_prefill_tokens(3, 512) == 512
    budget.observe(3, 0, 0.005)
    budget.observe(3, 100, 0.105)
    assert budget.max_prefill_tokens(3, 512) == MIN_PREFILL_TOKENS
    assert budget.max_prefill_tokens(0, 512) == 512
    assert budget.max_prefill_tokens(3, 7) == 7


def test_a_slow_step_counts_at_once_and_a_fast_one_slowly():
    budget = StepBudget(0.1)
    budget.observe(1, 100, 0.1)
    assert budget.max_prefill_tokens(1, 512) == 100
    budget.observe(1, 100, 0.2)
    assert budget.max_prefill_tokens(1, 512) == 50
    budget.observe(1, 100, 0.1)
    assert 50 < budget.max_prefill_tokens(1, 512) < 60


def test_the_limit_must_be_positive():
    with pytest.raises(ConfigError, match="max_itl_s"):
        EngineConfig(num_blocks=4, max_model_len=16, max_itl_s=0.0)
