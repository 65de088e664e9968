"""What the head of engine/scheduler.py promises about waiting, measured in steps."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import (
    Abort,
    AddRequest,
    EngineRequest,
    Finished,
    PrefillDone,
    Refused,
    Release,
    Reserve,
    Reserved,
    TokenOut,
)
from engine.sampling_params import SamplingParams
from tests.support.fake_runner import VOCAB, FakeRunner, continuation


class Driver:
    def __init__(self, **config: int) -> None:
        fields = {"num_blocks": 200, "max_model_len": 2000, "block_size": 4, "max_batch_tokens": 16, "max_num_seqs": 8}
        self.config = EngineConfig(**(fields | config))
        self.runner = FakeRunner(self.config.num_blocks, self.config.block_size)
        self.engine = Engine(self.config, self.runner, vocab_size=VOCAB)
        self.token_steps: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def request(self, name: str, num_prompt: int, max_tokens: int, *, prefill_only: bool = False) -> EngineRequest:
        # The name goes into the tokens, so that prompts share no prefix.
        prompt = tuple((ord(name[0]) + i * (ord(name[-1]) % 7 + 1)) % VOCAB for i in range(num_prompt))
        self.runner.begin(name, prompt)
        self.token_steps[name] = []
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        return EngineRequest(name, prompt, params, prefill_only=prefill_only)

    def add(self, name: str, num_prompt: int, max_tokens: int, *, prefill_only: bool = False) -> list[object]:
        request = self.request(name, num_prompt, max_tokens, prefill_only=prefill_only)
        return self.absorb(self.engine.handle(AddRequest(request), 0.0))

    def step(self) -> None:
        self.absorb(self.engine.step(0.0))

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def absorb(self, events: list[object]) -> list[object]:
        for event in events:
            if isinstance(event, TokenOut):
                self.token_steps[event.request_id].append(self.runner.num_steps)
            elif isinstance(event, Finished | Refused):
                self.ended[event.request_id] = event.reason
        return events


def test_a_decode_gets_a_token_in_every_step_while_long_prompts_are_chunked() -> None:
    driver = Driver()
    driver.add("a", 5, 60)
    driver.step()
    for name in ("b", "c"):
        driver.add(name, 200, 2)
    driver.run()
    steps = driver.token_steps["a"]
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {1}
    assert max(driver.runner.num_tokens) <= 16


def test_a_short_prompt_is_not_behind_a_long_one() -> None:
    driver = Driver()
    driver.add("l", 400, 1)
    driver.step()
    driver.add("s", 8, 1)
    driver.run()
    budget = driver.config.max_batch_tokens
    assert driver.token_steps["s"][0] <= 1 + -(-8 // (budget // 2))
    assert driver.token_steps["l"][0] <= -(-400 // (budget // 2)) + 1


def test_a_long_prompt_goes_on_under_a_stream_of_short_ones() -> None:
    driver = Driver()
    driver.add("l", 160, 1)
    for i in range(200):
        if driver.token_steps["l"]:
            break
        driver.add(f"s{i}", 8, 1)
        driver.step()
    assert driver.token_steps["l"][0] <= 160 // 8, "the oldest has half of each step"


@pytest.mark.parametrize("num_blocks", [4, 5, 7])
def test_preempted_requests_end_with_the_right_tokens_and_always_bring_one_forward(num_blocks: int) -> None:
    driver = Driver(num_blocks=num_blocks)
    requests = {name: driver.request(name, 3, 12) for name in "abc"}
    for request in requests.values():
        driver.absorb(driver.engine.handle(AddRequest(request), 0.0))
    driver.run()
    for name, request in requests.items():
        assert driver.runner.known[name] == [
            *request.prompt_token_ids,
            *continuation(request.prompt_token_ids, 12),
        ]
    assert Counter(driver.ended.values()) == {"length": 3}
    ledger = driver.engine.ledger()
    assert ledger.free + ledger.cached == num_blocks


def test_what_can_never_fit_is_refused_at_once_with_the_real_limit_and_the_next_is_served() -> None:
    driver = Driver(num_blocks=10, max_model_len=1024)
    [refused] = driver.add("x", 38, 10)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.param) == ("invalid", "max_tokens")
    assert "40" in refused.message
    [refused] = driver.add("y", 50, 1)
    assert isinstance(refused, Refused)
    assert refused.param == "prompt"
    driver.add("z", 5, 3)
    driver.run()
    assert driver.ended["z"] == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [((), 3, "prompt"), ((VOCAB,), 3, "prompt"), ((-1,), 3, "prompt"), ((1,), 0, "max_tokens")],
)
def test_a_bad_request_is_refused_by_the_name_of_its_field(
    prompt: tuple[int, ...], max_tokens: int, param: str
) -> None:
    driver = Driver()
    request = EngineRequest("x", prompt, SamplingParams(max_tokens=max_tokens))
    [refused] = driver.engine.handle(AddRequest(request), 0.0)
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.param) == ("invalid", param)


def test_what_the_random_draw_cannot_take_is_refused_at_the_door() -> None:
    driver = Driver()
    for fields in ({"choice": -1}, {"choice": 2**64}, {"seed": 2**63}, {"seed": -(2**63) - 1}):
        request = EngineRequest("x", (1,), SamplingParams(max_tokens=3, **fields))
        [refused] = driver.engine.handle(AddRequest(request), 0.0)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.param) == ("invalid", next(iter(fields)))


def test_a_reservation_that_finds_no_room_takes_nothing() -> None:
    driver = Driver(num_blocks=6)
    [first] = driver.engine.handle(Reserve(driver.request("a", 16, 2)), 0.0)
    assert isinstance(first, Reserved)
    before = driver.engine.ledger()
    [second] = driver.engine.handle(Reserve(driver.request("b", 16, 2)), 0.0)
    assert isinstance(second, Refused)
    assert second.reason == "busy"
    assert driver.engine.ledger() == before
    driver.engine.handle(Abort("a"), 0.0)
    assert isinstance(driver.engine.handle(Reserve(driver.request("c", 16, 2)), 0.0)[0], Reserved)


def test_work_that_waits_for_held_blocks_goes_on_when_they_are_released() -> None:
    driver = Driver(num_blocks=5)
    driver.add("p", 14, 5, prefill_only=True)
    events: list[object] = []
    while driver.engine.has_work():
        events += driver.engine.step(0.0)
    assert any(isinstance(event, PrefillDone) for event in events)
    assert driver.engine.ledger().held == 4
    driver.add("a", 10, 2)
    driver.run()
    assert not driver.token_steps["a"]
    driver.engine.handle(Release("p"), 0.0)
    driver.run()
    assert driver.ended["a"] == "length"


@pytest.mark.parametrize("num_prompt", [3, 4, 5, 8])
def test_a_repeated_prompt_hits_all_but_what_must_be_computed(num_prompt: int) -> None:
    """Full blocks only, and one token is always left to have logits from."""
    driver = Driver()
    prompt = tuple(range(num_prompt))
    cached = []
    for name in ("first", "second", "third"):
        driver.runner.begin(name, prompt)
        driver.token_steps[name] = []
        request = EngineRequest(name, prompt, SamplingParams(max_tokens=2, temperature=0.0))
        driver.engine.handle(AddRequest(request), 0.0)
        while driver.engine.has_work():
            cached += [e.stats.num_cached_tokens for e in driver.engine.step(0.0) if isinstance(e, Finished)]
    assert cached == [0, *[(num_prompt - 1) // 4 * 4] * 2]
