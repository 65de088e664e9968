"""What the head of engine/scheduler.py promises about blocks: who waits, who is preempted, who is never overtaken."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.block_pool import BlockPool, Owner
from engine.config import EngineConfig
from engine.messages import EngineRequest
from engine.request import Request, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler, share_prefill_tokens


class Run:
    """A scheduler whose model says 0."""

    def __init__(self, **fields: int) -> None:
        self.config = EngineConfig(**({"max_model_len": 400, "block_size": 4, "prefix_caching": False} | fields))
        self.scheduler = Scheduler(self.config)
        self.requests: list[Request] = []

    def request(self, num_prompt: int, max_tokens: int, *, prefill_only: bool = False) -> Request:
        name = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=max_tokens)
        spec = EngineRequest(name, tuple(range(num_prompt)), params, prefill_only=prefill_only)
        self.requests.append(Request(spec, b"", 0.0))
        return self.requests[-1]

    def add(self, num_prompt: int, max_tokens: int, *, prefill_only: bool = False) -> Request:
        request = self.request(num_prompt, max_tokens, prefill_only=prefill_only)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[Request, int]:
        """Tokens computed of each request."""
        step = self.scheduler.schedule(0.0)
        for request, num_tokens in step:
            self.scheduler.computed(request, num_tokens)
            if request.num_uncomputed:
                continue
            self.scheduler.sampled(request, 0, 0.0)
            if len(request.output_token_ids) >= request.sampling.max_tokens:
                self.scheduler.end(request, 0.0)
            elif request.prefill_only:
                self.scheduler.hold(request, 0.0)
        self.scheduler.check_integrity()
        return dict(step)


@pytest.mark.parametrize(
    ("left", "budget", "shares"),
    [
        ([100], 16, [16]),
        ([100, 3, 50], 16, [8, 3, 5]),
        ([100, 50, 3], 16, [8, 5, 3]),
        ([2, 100], 16, [2, 14]),
        ([100, 1, 1], 16, [14, 1, 1]),
        ([5, 5], 1, [1, 0]),
        ([5, 9, 9], 3, [2, 1, 0]),
        ([3, 2], 16, [3, 2]),
    ],
)
def test_the_oldest_prefill_has_half_and_the_shortest_goes_first(
    left: list[int], budget: int, shares: list[int]
) -> None:
    assert share_prefill_tokens(left, budget) == shares


def test_every_resumption_brings_a_token_and_the_oldest_is_never_preempted() -> None:
    rng = random.Random(5)
    for num_blocks in range(4, 16):
        run = Run(num_blocks=num_blocks, max_num_seqs=6, max_batch_tokens=8)
        for _ in range(7):
            num_prompt = rng.randint(1, 8)
            run.add(num_prompt, rng.randint(1, run.config.capacity_tokens - num_prompt))
        made_at_preemption: dict[Request, int] = {}
        seen = dict.fromkeys(run.requests, 0)
        for _ in range(5000):
            alive = [request for request in run.requests if request.state is not RequestState.ENDED]
            if not alive:
                break
            assert run.step(), "something can always be computed"
            for request in alive:
                if request.num_preemptions > seen[request]:
                    assert request is not alive[0], "the oldest gives nobody its blocks"
                    assert len(request.output_token_ids) > made_at_preemption.get(request, 0), "in vain"
                    made_at_preemption[request] = len(request.output_token_ids)
                    seen[request] = request.num_preemptions
        assert all(len(r.output_token_ids) == r.sampling.max_tokens for r in run.requests)
        assert run.scheduler.ledger().free == num_blocks


def test_admission_leaves_running_decodes_the_blocks_that_they_need_meanwhile() -> None:
    """A prompt of many chunks that would just fit does not get blocks that the decode needs before it is done."""
    run = Run(num_blocks=24, max_num_seqs=4, max_batch_tokens=4)
    decode = run.add(4, 60)
    run.step()
    long = run.add(80, 4)
    # 22 of the 24 blocks are available and 20 are needed; its 27 steps would cost the decode 7 more.
    outputs = []
    while decode.state is not RequestState.ENDED:
        run.step()
        outputs.append(len(decode.output_token_ids))
    assert {later - earlier for earlier, later in itertools.pairwise(outputs)} == {1}, "never skips a step"
    assert not long.num_preemptions
    while long.state is not RequestState.ENDED:
        assert run.step()


def test_a_reservation_does_not_take_what_an_earlier_request_waits_for() -> None:
    run = Run(num_blocks=10, max_num_seqs=8, max_batch_tokens=64)
    first = run.add(16, 24)
    run.step()
    waiting = run.add(20, 4)
    run.step()
    assert waiting.state is RequestState.WAITING
    assert not run.scheduler.reserve(run.request(4, 2), 0.0), "there are free blocks, but they are spoken for"
    while waiting.state is RequestState.WAITING:
        run.step()
    assert first.state is RequestState.ENDED
    while waiting.state is not RequestState.ENDED:
        run.step()
    assert run.scheduler.reserve(run.request(4, 2), 0.0)


def test_reservations_count_against_the_seats() -> None:
    run = Run(num_blocks=100, max_num_seqs=3, max_batch_tokens=64)
    run.add(4, 50)
    run.step()
    assert run.scheduler.reserve(run.request(4, 5), 0.0)
    assert run.scheduler.reserve(run.request(4, 5), 0.0)
    assert not run.scheduler.reserve(run.request(4, 5), 0.0)
    late = run.add(4, 5)
    run.step()
    assert late.state is RequestState.WAITING
    run.scheduler.end(run.requests[1], 0.0)
    run.step()
    assert late.state is RequestState.RUNNING


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    run = Run(num_blocks=10, max_num_seqs=8, max_batch_tokens=64)
    run.add(16, 8)
    run.step()
    large, small = run.add(32, 4), run.add(1, 2)
    while large.state is RequestState.WAITING:
        run.step()
        assert small.first_step_at is None or large.first_step_at is not None
    while small.state is not RequestState.ENDED:
        run.step()


def test_a_lone_decode_waits_for_held_blocks_and_goes_on_when_they_come_back() -> None:
    run = Run(num_blocks=4, max_num_seqs=4, max_batch_tokens=8)
    decode = run.add(3, 13)
    run.step()
    held = run.add(4, 2, prefill_only=True)
    while run.step():
        pass
    assert held.state is RequestState.HELD
    assert (decode.state, decode.num_computed) == (RequestState.RUNNING, 12), "it keeps its KV"
    run.scheduler.end(held, 0.0)
    while decode.state is not RequestState.ENDED:
        assert run.step()
    assert not decode.num_preemptions


def test_decodes_and_prefills_both_go_on_when_every_seat_is_taken() -> None:
    run = Run(num_blocks=200, max_num_seqs=4, max_batch_tokens=4)
    decodes = [run.add(1, 100) for _ in range(3)]
    run.step()
    long = run.add(40, 2)
    for _ in range(40):
        step = run.step()
        assert sum(step.values()) <= 4
        assert all(step[decode] == 1 for decode in decodes)
    assert len(long.output_token_ids) == 1, "one token of it a step"


def test_the_youngest_decode_is_preempted_and_waits_before_all_that_came_later() -> None:
    run = Run(num_blocks=9, max_num_seqs=4, max_batch_tokens=16)
    old, middle = run.add(4, 20), run.add(4, 20)
    run.step()
    young = run.request(4, 20)
    assert run.scheduler.reserve(young, 0.0)
    run.scheduler.start(young, 0, 0.0)
    late = run.add(30, 2)
    while not young.num_preemptions:
        run.step()
    assert (old.num_preemptions, middle.num_preemptions) == (0, 0)
    assert (young.state, late.state) == (RequestState.WAITING, RequestState.WAITING)
    while young.state is RequestState.WAITING:
        run.step()
        assert late.state is RequestState.WAITING
    while late.state is not RequestState.ENDED:
        assert run.step()


def test_the_end_of_the_least_recently_used_prefix_is_reclaimed_first() -> None:
    pool = BlockPool(6)
    prefixes = {name: [f"{name}{i}".encode() for i in range(3)] for name in "ab"}
    for keys in prefixes.values():
        blocks = pool.take((), 3, Owner.RUNNING)
        for block, key in zip(blocks, keys, strict=True):
            pool.publish(block, key)
        pool.free(blocks, Owner.RUNNING)
    assert (pool.num_free, pool.num_cached) == (0, 6)
    hits = pool.match(prefixes["a"][:1])
    pool.free(pool.take(hits, 0, Owner.RUNNING), Owner.RUNNING)
    pool.take((), 3, Owner.RUNNING)
    assert [len(pool.match(keys)) for keys in prefixes.values()] == [1, 2], "a's end and middle, then b's end"
    pool.check_integrity()


def test_a_shared_block_counts_once_and_is_back_when_its_last_owner_is_done() -> None:
    pool = BlockPool(4)
    first = pool.take((), 2, Owner.RUNNING)
    pool.publish(first[0], b"k")
    second = pool.take(pool.match([b"k"]), 1, Owner.RESERVED)
    assert (pool.num_owned(Owner.RUNNING), pool.num_owned(Owner.RESERVED), pool.num_available) == (2, 1, 1)
    pool.move(first, Owner.RUNNING, Owner.HELD)
    assert (pool.num_owned(Owner.RESERVED), pool.num_owned(Owner.HELD)) == (2, 1)
    pool.free(second, Owner.RESERVED)
    assert (pool.num_owned(Owner.HELD), pool.num_free) == (2, 2)
    pool.free(first, Owner.HELD)
    assert (pool.num_cached, pool.num_free) == (1, 3)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(first, Owner.HELD)
    pool.check_integrity()
