"""The whole engine under any order of commands and steps, over a runner that notices every misplaced KV."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineRequest,
    Finished,
    Held,
    Hold,
    KvComputed,
    KvRead,
    KvWritten,
    PrefillDone,
    ReadKv,
    Refused,
    Release,
    Released,
    Reserve,
    Reserved,
    Resume,
    StartDecode,
    TokenOut,
    WriteKv,
)
from engine.sampling_params import SamplingParams
from tests.support.fake_runner import KV_BYTES, VOCAB, FakeRunner, continuation, prefix_hashes

STEPS_TO_DRAIN = 3000


class EngineUnderCommands(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 14),
        block_size=st.sampled_from([1, 2, 4]),
        batch=st.sampled_from([(8, 4), (16, 3), (4, 4)]),
        caching=st.booleans(),
    )
    def begin(self, num_blocks: int, block_size: int, batch: tuple[int, int], caching: bool) -> None:
        self.config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=200,
            block_size=block_size,
            max_batch_tokens=batch[0],
            max_num_seqs=batch[1],
            prefix_caching=caching,
        )
        self.runner = FakeRunner(num_blocks, block_size)
        self.engine = Engine(self.config, self.runner, vocab_size=VOCAB)
        self.requests: dict[str, EngineRequest] = {}
        self.output: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.reserved: dict[str, int] = {}
        self.held: set[str] = set()
        self.paused: set[str] = set()
        self.count = 0

    def command(self, command: Command) -> None:
        self.absorb(self.engine.handle(command, float(self.runner.num_steps)))

    def absorb(self, events: list[object]) -> None:
        for event in events:
            request_id = getattr(event, "request_id", "")
            match event:
                case TokenOut():
                    assert request_id not in self.ended
                    assert event.index == len(self.output[request_id]), "indexes are in order, each once"
                    self.output[request_id].append(event.token_id)
                case Finished():
                    assert request_id not in self.ended, "ends once"
                    self.ended[request_id] = event.reason
                    self.reserved.pop(request_id, None)
                    self.held.discard(request_id)
                    self.paused.discard(request_id)
                case Refused():
                    self.ended[request_id] = event.reason
                case Reserved():
                    self.reserved[request_id] = event.num_cached_tokens
                case PrefillDone():
                    self.held.add(request_id)
                case Held():
                    if event.ok:
                        self.paused.add(request_id)
                        tokens = [*self.requests[request_id].prompt_token_ids, *self.output[request_id]]
                        assert event.num_tokens == len(tokens) - 1, "all but the token that was sampled last"
                case Released():
                    self.held.discard(request_id)
                    self.paused.discard(request_id)
                    self.ended[request_id] = "released"
                case KvComputed() | KvRead() | KvWritten():
                    pass
                case _:
                    raise AssertionError(f"no such event: {event}")

    def make(self, prompt: list[int], max_tokens: int, made: int, prefill_only: bool) -> EngineRequest:
        self.count += 1
        made = min(made, max_tokens - 1)
        outputs = continuation(prompt, made)
        request = EngineRequest(
            f"r{self.count}",
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens, temperature=0.0),
            tuple(outputs),
            prefill_only=prefill_only,
        )
        self.requests[request.request_id] = request
        self.output[request.request_id] = list(outputs)
        self.runner.begin(request.request_id, [*prompt, *outputs])
        return request

    # A small alphabet, so that prompts share prefixes.
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)

    @rule(prompt=prompts, max_tokens=st.integers(1, 12), made=st.integers(0, 3), prefill_only=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, made: int, prefill_only: bool) -> None:
        self.command(AddRequest(self.make(prompt, max_tokens, made, prefill_only)))

    @rule(prompt=prompts, max_tokens=st.integers(2, 12), made=st.integers(0, 3))
    def reserve(self, prompt: list[int], max_tokens: int, made: int) -> None:
        request = self.make(prompt, max_tokens, made, prefill_only=False)
        self.command(Reserve(request))

    @precondition(lambda self: bool(self.reserved))
    @rule(data=st.data(), complete=st.sampled_from([True, True, True, False]), cut=st.integers(1, 7))
    def ship_in_and_start(self, data: st.DataObject, complete: bool, cut: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.reserved)))
        request = self.requests[request_id]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        hashes = np.array(prefix_hashes(tokens), dtype=np.uint64)
        starts = list(range(self.reserved[request_id], len(tokens), cut))
        for start in starts if complete else starts[:-1]:
            end = min(start + cut, len(tokens))
            [event] = self.engine.handle(WriteKv(request_id, start, end - start, hashes[start:end].view(np.uint8)), 0.0)
            assert isinstance(event, KvWritten)
            assert event.ok
        del self.reserved[request_id]
        [first] = continuation(tokens, 1)
        if complete:
            self.runner.known[request_id].append(first)
            self.output[request_id].append(first)
        self.command(StartDecode(request_id, first))
        if not complete:
            assert self.ended[request_id] == "error", "never decodes from incomplete KV"

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def read_and_release(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        request = self.requests[request_id]
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        buffer = np.zeros(len(tokens) * KV_BYTES, dtype=np.uint8)
        [event] = self.engine.handle(ReadKv(request_id, 0, len(tokens), buffer), 0.0)
        assert isinstance(event, KvRead)
        assert event.ok
        assert buffer.view(np.uint64).tolist() == prefix_hashes(tokens), "held KV is still the request's"
        self.command(Release(request_id))
        self.command(Release(request_id))

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        if self.requests:
            self.command(Hold(data.draw(st.sampled_from(sorted(self.requests)))))

    @precondition(lambda self: bool(self.paused))
    @rule(data=st.data(), how=st.sampled_from([Resume, Release]))
    def move_or_resume(self, data: st.DataObject, how: type[Resume] | type[Release]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.paused)))
        tokens = [*self.requests[request_id].prompt_token_ids, *self.output[request_id]][:-1]
        buffer = np.zeros(len(tokens) * KV_BYTES, dtype=np.uint8)
        [event] = self.engine.handle(ReadKv(request_id, 0, len(tokens), buffer), 0.0)
        assert isinstance(event, KvRead)
        assert event.ok
        assert buffer.view(np.uint64).tolist() == prefix_hashes(tokens)
        self.command(how(request_id))
        self.paused.discard(request_id)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            request_id = data.draw(st.sampled_from(sorted(self.requests)))
            was_ended = request_id in self.ended
            self.command(Abort(request_id))
            assert request_id in self.ended
            if not was_ended:
                assert self.ended[request_id] == "abort"

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work():
                self.absorb(self.engine.step(float(self.runner.num_steps)))

    @invariant()
    def blocks_have_one_owner_and_sum_to_the_pool(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        ledger = self.engine.ledger()
        states = (ledger.free, ledger.cached, ledger.running, ledger.reserved, ledger.held)
        assert sum(states) == self.config.num_blocks

    @invariant()
    def a_step_keeps_to_its_budget(self) -> None:
        if hasattr(self, "runner") and self.runner.num_tokens:
            assert max(self.runner.num_tokens) <= self.config.max_batch_tokens

    def teardown(self) -> None:
        """Once nobody holds a reservation or finished KV, every request ends, with the oracle's tokens."""
        if not hasattr(self, "engine"):
            return
        for request_id in [*self.reserved, *self.held, *self.paused]:
            self.command(Abort(request_id))
        for _ in range(STEPS_TO_DRAIN):
            for request_id in list(self.held):
                self.command(Release(request_id))
            if not self.engine.has_work():
                break
            self.absorb(self.engine.step(float(self.runner.num_steps)))
        assert self.engine.is_empty(), "a request that fits ends"
        assert set(self.ended) == set(self.requests)
        for request_id, request in self.requests.items():
            expected = continuation(request.prompt_token_ids, request.sampling.max_tokens)
            made = self.output[request_id]
            assert made == expected[: len(made)], "a wrong token"
            if self.ended[request_id] == "length":
                assert made == expected
        ledger = self.engine.ledger()
        assert ledger.free + ledger.cached == self.config.num_blocks, "every block is back"


EngineUnderCommands.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEngineUnderCommands = EngineUnderCommands.TestCase
