"""What each command answers, in the order and under the conditions that engine/messages.py states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import (
    Abort,
    AddRequest,
    Command,
    EngineRequest,
    Event,
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

PROMPT = tuple(range(10))
FIRST, SECOND, THIRD = continuation(PROMPT, 3)


class Life:
    def __init__(self, **fields: int) -> None:
        sizes = {"num_blocks": 30, "max_model_len": 100, "block_size": 4, "max_batch_tokens": 4, "max_num_seqs": 4}
        self.config = EngineConfig(**(sizes | fields))
        self.runner = FakeRunner(self.config.num_blocks, self.config.block_size)
        self.engine = Engine(self.config, self.runner, vocab_size=VOCAB)
        self.now = 0.0

    def request(self, name: str, *, prefill_only: bool = False, domain: bytes = b"", **fields: Any) -> EngineRequest:
        self.runner.begin(name, PROMPT)
        params = SamplingParams(**{"max_tokens": 3, "temperature": 0.0} | fields)
        return EngineRequest(name, PROMPT, params, prefill_only=prefill_only, cache_domain=domain)

    def do(self, command: Command) -> list[Event]:
        return self.engine.handle(command, self.now)

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def step(self) -> list[Event]:
        return self.engine.step(self.clock)

    def run(self) -> list[Event]:
        events = []
        while self.engine.has_work():
            events += self.step()
        return events

    def write(self, name: str, start: int, end: int) -> bool:
        hashes = np.array(prefix_hashes(PROMPT)[start:end], dtype=np.uint64)
        [event] = self.do(WriteKv(name, start, end - start, hashes.view(np.uint8)))
        assert isinstance(event, KvWritten)
        return event.ok

    def read(self, name: str, start: int, num_tokens: int, num_bytes: int | None = None) -> list[int] | None:
        buffer = np.zeros(num_tokens * KV_BYTES if num_bytes is None else num_bytes, dtype=np.uint8)
        [event] = self.do(ReadKv(name, start, num_tokens, buffer))
        assert isinstance(event, KvRead)
        return buffer.view(np.uint64).tolist() if event.ok else None


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_prompt_computed_to_be_shipped() -> None:
    life = Life()
    assert life.do(AddRequest(life.request("p", prefill_only=True))) == []
    assert life.step() == [KvComputed("p", 4)]
    assert life.read("p", 0, 4) == prefix_hashes(PROMPT)[:4], "readable while the rest is computed"
    assert life.read("p", 2, 3) is None, "token 4 is not computed yet"
    assert life.step() == [KvComputed("p", 8)]
    events = life.step()
    assert events[:2] == [KvComputed("p", 10), TokenOut("p", 0, FIRST)]
    assert kinds(events[2:]) == ["PrefillDone"]
    assert life.read("p", 3, 7) == prefix_hashes(PROMPT)[3:]
    assert life.read("p", 10, 1) is None, "the first output token has no KV here"
    assert life.engine.ledger().held == 3
    assert not life.engine.has_work()
    assert life.do(Release("p")) == [Released("p")]
    assert life.do(Release("p")) == life.do(Abort("p")) == []
    assert life.read("p", 0, 1) is None
    assert (life.engine.ledger().held, life.engine.ledger().cached) == (0, 2), "full blocks stay in the prefix cache"


def test_a_first_token_that_ends_the_request_holds_nothing() -> None:
    for fields, reason in (({"max_tokens": 1}, "length"), ({"stop_token_ids": (FIRST,)}, "stop")):
        life = Life(max_batch_tokens=16)
        life.do(AddRequest(life.request("p", prefill_only=True, **fields)))
        token, finished = life.run()
        assert token == TokenOut("p", 0, FIRST)
        assert isinstance(finished, Finished)
        assert finished.reason == reason
        assert life.engine.is_empty()
        assert life.engine.ledger().held == 0


def test_a_decode_is_held_read_and_goes_on_where_it_was() -> None:
    life = Life(max_batch_tokens=16)
    life.do(AddRequest(life.request("d")))
    assert life.step() == [TokenOut("d", 0, FIRST)]
    assert life.do(Hold("d")) == [Held("d", ok=True, num_tokens=10)]
    assert not life.engine.has_work()
    assert life.do(Hold("d")) == [Held("d", ok=True, num_tokens=10)], "asked twice, answered twice"
    assert life.engine.ledger().requests["held"] == 1
    assert life.read("d", 0, 10) == prefix_hashes(PROMPT)
    life.do(Resume("d"))
    second, third, finished = life.run()
    assert [second, third] == [TokenOut("d", 1, SECOND), TokenOut("d", 2, THIRD)]
    assert isinstance(finished, Finished)
    assert life.do(Hold("d")) == life.do(Resume("d")) == []


def test_what_does_not_decode_cannot_be_held() -> None:
    life = Life()
    life.do(AddRequest(life.request("p")))
    life.step()
    assert life.do(Hold("p")) == [Held("p", ok=False)], "its prompt is not computed yet"
    life.do(Reserve(life.request("d")))
    assert life.do(Hold("d")) == [Held("d", ok=False)]


def test_a_held_decode_keeps_its_seat() -> None:
    life = Life(max_batch_tokens=16, max_num_seqs=1)
    life.do(AddRequest(life.request("d")))
    life.step()
    life.do(Hold("d"))
    life.do(AddRequest(life.request("e")))
    assert life.step() == []
    life.do(Resume("d"))
    assert {event.request_id for event in life.step()} == {"d"}


def test_kv_shipped_in_then_decoded() -> None:
    life = Life()
    assert life.do(Reserve(life.request("d"))) == [Reserved("d", 0)]
    assert life.engine.ledger().reserved == 3
    assert not life.engine.has_work(), "nothing to compute before StartDecode"
    assert life.write("d", 6, 10)
    assert life.write("d", 0, 6)
    assert life.write("d", 2, 4), "a segment that comes twice"
    life.runner.known["d"].append(FIRST)
    assert life.do(StartDecode("d", FIRST)) == []
    second, third, finished = life.run()
    assert [second, third] == [TokenOut("d", 1, SECOND), TokenOut("d", 2, THIRD)]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stats.num_output_tokens) == ("length", 3)


@pytest.mark.parametrize(("fields", "reason"), [({"max_tokens": 1}, "length"), ({"stop_token_ids": (FIRST,)}, "stop")])
def test_a_shipped_token_that_ends_the_request(fields: dict[str, Any], reason: str) -> None:
    life = Life()
    life.do(Reserve(life.request("d", **fields)))
    life.write("d", 0, 10)
    [finished] = life.do(StartDecode("d", FIRST))
    assert isinstance(finished, Finished)
    assert finished.reason == reason
    assert life.engine.is_empty()


def test_shipped_kv_can_be_hit_and_what_was_hit_cannot_be_written() -> None:
    life = Life()
    life.do(Reserve(life.request("d")))
    assert life.write("d", 0, 10)
    assert life.do(Reserve(life.request("too early"))) == [Reserved("too early", 0)], "unverified KV is not shared"
    life.do(StartDecode("d", FIRST))
    assert life.do(Reserve(life.request("e"))) == [Reserved("e", 8)]
    assert life.do(Reserve(life.request("f", domain=b"other"))) == [Reserved("f", 0)]
    assert not life.write("e", 7, 9), "token 7 lies in a block of the prefix cache"
    assert life.write("e", 8, 10)
    life.runner.known["e"].append(FIRST)
    assert life.do(StartDecode("e", FIRST)) == []


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_bytes"), [(-1, 2, 16), (0, 0, 0), (0, -1, 8), (9, 2, 16), (0, 2, 15), (0, 2, 24)]
)
def test_kv_out_of_bounds_is_neither_read_nor_written(start: int, num_tokens: int, num_bytes: int) -> None:
    life = Life()
    life.do(AddRequest(life.request("p", prefill_only=True)))
    life.run()
    life.do(Reserve(life.request("d", domain=b"other")))
    before = life.runner.slots.copy()
    buffer = np.full(num_bytes, 7, dtype=np.uint8)
    assert life.do(WriteKv("d", start, num_tokens, buffer)) == [KvWritten("d", start, num_tokens, ok=False)]
    assert life.do(ReadKv("p", start, num_tokens, buffer)) == [KvRead("p", start, num_tokens, ok=False)]
    assert (buffer == 7).all()
    assert (life.runner.slots == before).all()


@pytest.mark.parametrize("written", [[], [(0, 9)], [(1, 10)], [(0, 4), (5, 10)], [(6, 10), (0, 5)]])
def test_holes_end_the_request_and_nothing_of_it_can_be_hit(written: list[tuple[int, int]]) -> None:
    life = Life()
    life.do(Reserve(life.request("d")))
    for start, end in written:
        assert life.write("d", start, end)
    [finished] = life.do(StartDecode("d", FIRST))
    assert isinstance(finished, Finished)
    assert finished.reason == "error"
    assert "was written" in finished.message
    assert life.engine.ledger().free == life.config.num_blocks


def test_commands_out_of_place_end_the_request_or_are_ignored() -> None:
    life = Life()
    for command in (StartDecode("x", 1), Release("x"), Abort("x")):
        assert life.do(command) == []
    life.do(AddRequest(life.request("a")))
    [refused] = life.do(AddRequest(life.request("a")))
    assert isinstance(refused, Refused)
    assert refused.param == "request_id"
    [refused] = life.do(Reserve(life.request("b", prefill_only=True)))
    assert isinstance(refused, Refused)
    assert refused.reason == "invalid"
    assert life.read("a", 0, 1) is None
    assert not life.write("a", 0, 1)
    for command in (StartDecode("a", FIRST), Release("a")):
        [finished] = life.do(command)
        assert isinstance(finished, Finished)
        assert finished.reason == "error"
        life.do(AddRequest(life.request("a")))
    life.do(Reserve(life.request("c")))
    life.write("c", 0, 10)
    [finished] = life.do(StartDecode("c", VOCAB))
    assert isinstance(finished, Finished)
    assert "vocabulary" in finished.message


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("prefill_only", [True, False])
def test_an_abort_at_any_step_gives_every_block_back(num_steps: int, prefill_only: bool) -> None:
    life = Life()
    life.do(AddRequest(life.request("a", prefill_only=prefill_only, max_tokens=20)))
    for _ in range(num_steps):
        life.step()
    [finished] = life.do(Abort("a"))
    assert isinstance(finished, Finished)
    assert finished.reason == "abort"
    ledger = life.engine.ledger()
    assert ledger.free + ledger.cached == life.config.num_blocks
    life.engine.check_integrity()
    assert not life.engine.has_work()


def test_stop_tokens_count_only_after_min_tokens() -> None:
    """The sampler masks them too; one that was made elsewhere must not end the request either."""
    life = Life(max_batch_tokens=16)
    life.do(AddRequest(life.request("a", max_tokens=9, min_tokens=4, stop_token_ids=tuple(range(VOCAB)))))
    events = life.run()
    assert kinds(events) == ["TokenOut"] * 5 + ["Finished"]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"


def test_times_are_those_of_the_steps() -> None:
    life = Life(max_num_seqs=1)
    life.now = 10.0
    life.do(AddRequest(life.request("a", max_tokens=2)))
    life.do(AddRequest(life.request("b", max_tokens=2)))
    stats = {event.request_id: event.stats for event in life.run() if isinstance(event, Finished)}
    # Each step reads the clock before and after, a second apart: 3 chunks, then one more token; b hits two blocks.
    assert (stats["a"].queue_s, stats["a"].prefill_s, stats["a"].decode_s) == (1.0, 5.0, 2.0)
    assert (stats["b"].queue_s, stats["b"].prefill_s, stats["b"].decode_s) == (9.0, 1.0, 2.0)
    assert (stats["a"].num_cached_tokens, stats["b"].num_cached_tokens) == (0, 8)
    life.do(Reserve(life.request("c", domain=b"c")))
    life.now += 100.0
    life.write("c", 0, 10)
    life.runner.known["c"].append(FIRST)
    life.do(StartDecode("c", FIRST))
    [finished] = [event for event in life.run() if isinstance(event, Finished)]
    shipped = finished.stats
    assert (shipped.queue_s, shipped.prefill_s, shipped.first_step_s, shipped.decode_s) == (0.0, 0.0, 2.0, 2.0)


def test_a_prefill_that_is_done_tells_its_times() -> None:
    life = Life(max_batch_tokens=16)
    life.do(AddRequest(life.request("p", prefill_only=True)))
    [done] = [event for event in life.run() if isinstance(event, PrefillDone)]
    assert (done.stats.queue_s, done.stats.prefill_s, done.stats.num_output_tokens) == (1.0, 1.0, 1)
