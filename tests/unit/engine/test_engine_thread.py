from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDead
from engine.loop import EngineThread
from engine.messages import (
    Abort,
    AddRequest,
    EngineFailed,
    EngineRequest,
    Event,
    Finished,
    LedgerSnapshot,
    Release,
    TokenOut,
)
from engine.runner import SampledToken, StepBatch
from engine.sampling_params import SamplingParams
from tests.support.fake_runner import VOCAB, FakeRunner, continuation

DEADLINE_S = 20.0


class GatedRunner(FakeRunner):
    """Computes a step for each permit, so that a test decides what happens in between."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.entered = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.broken = False

    def execute(self, batch: StepBatch) -> list[SampledToken]:
        self.entered.release()
        assert self.permits.acquire(timeout=DEADLINE_S)
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().execute(batch)


class Harness:
    def __init__(self) -> None:
        config = EngineConfig(num_blocks=20, max_model_len=80, block_size=4, max_batch_tokens=16, max_num_seqs=4)
        self.runner = GatedRunner(config.num_blocks, config.block_size)
        self.batches: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.engine = Engine(config, self.runner, vocab_size=VOCAB)
        self.ledgers: queue.SimpleQueue[LedgerSnapshot] = queue.SimpleQueue()
        """As it was when each batch was handed out."""
        self.refused_after_failing = False
        self.thread = EngineThread(self.engine, self._on_events)
        self.thread.start()

    def _on_events(self, events: list[Event]) -> None:
        if isinstance(events[0], EngineFailed):
            self.refused_after_failing = not self.submits("late")
        self.ledgers.put(self.thread.ledger())
        self.batches.put(events)

    def add(self, name: str, max_tokens: int) -> None:
        prompt = (1, 2, 3)
        self.runner.begin(name, prompt)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.thread.submit(AddRequest(EngineRequest(name, prompt, params)))

    def submits(self, name: str) -> bool:
        try:
            self.add(name, 1)
        except EngineDead:
            return False
        return True

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.runner.permits.release()

    def events(self) -> list[Event]:
        return self.batches.get(timeout=DEADLINE_S)


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    yield harness
    harness.runner.permits.release(1000)
    assert harness.thread.stop(DEADLINE_S)


def test_one_batch_of_events_a_step_for_all_that_was_queued(harness: Harness) -> None:
    harness.add("a", 2)
    assert harness.runner.entered.acquire(timeout=DEADLINE_S)
    # Both come while a step runs: the next one takes them together.
    harness.add("b", 2)
    harness.add("c", 2)
    harness.step(3)
    expected = continuation((1, 2, 3), 2)
    batches = [harness.events() for _ in range(3)]
    assert [[(e.request_id, e.index) for e in b if isinstance(e, TokenOut)] for b in batches] == [
        [("a", 0)],
        [("a", 1), ("b", 0), ("c", 0)],
        [("b", 1), ("c", 1)],
    ]
    assert [e.token_id for b in batches for e in b if isinstance(e, TokenOut) and e.request_id == "b"] == expected
    assert [e.request_id for b in batches for e in b if isinstance(e, Finished)] == ["a", "b", "c"]
    assert harness.thread.ledger().running == 0


def test_an_abort_during_a_step_ends_the_request_after_it(harness: Harness) -> None:
    harness.add("a", 50)
    assert harness.runner.entered.acquire(timeout=DEADLINE_S)
    harness.thread.submit(Abort("a"))
    harness.step()
    [token] = harness.events()
    assert isinstance(token, TokenOut)
    [finished] = harness.events()
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stats.num_output_tokens) == ("abort", 1)
    assert harness.thread.ledger().running == 0
    assert not harness.runner.entered.acquire(blocking=False), "nothing is computed for it any more"


def test_whoever_acts_on_an_event_finds_it_in_the_ledger(harness: Harness) -> None:
    harness.add("a", 3)
    harness.step(3)
    for running in (1, 1, 0):
        events = harness.events()
        ledger = harness.ledgers.get(timeout=DEADLINE_S)
        assert isinstance(events[0], TokenOut)
        assert ledger.requests["running"] == running
        assert ledger.free + ledger.cached + ledger.running == ledger.num_blocks


def test_a_failing_runner_ends_the_engine_with_one_last_event(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.add("a", 50)
    harness.runner.broken = True
    harness.step()
    [failed] = harness.events()
    assert failed == EngineFailed("RuntimeError: the device is gone")
    assert harness.refused_after_failing, "whoever learns of the failure can submit nothing more"
    harness.thread.submit(Abort("a"))
    harness.thread.submit(Release("a"))
    assert harness.thread.stop(DEADLINE_S)
    assert harness.batches.empty()
    assert "the engine failed" in caplog.text


def test_stop_ends_an_idle_thread_at_once_and_twice_is_fine(harness: Harness) -> None:
    assert harness.thread.stop(DEADLINE_S)
    assert harness.thread.stop(DEADLINE_S)
    with pytest.raises(EngineDead):
        harness.add("a", 1)


def test_stop_tells_when_a_step_is_still_running(harness: Harness) -> None:
    harness.add("a", 50)
    assert harness.runner.entered.acquire(timeout=DEADLINE_S)
    assert not harness.thread.stop(0.0)
    harness.step()
    assert harness.thread.stop(DEADLINE_S)
