"""Connections to workers: one that went stale is no error, and a silent worker loses its requests to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "m")


def pooled(stubs: StubSystem) -> int:
    connector = stubs.gateway._client._pooled.connector
    assert connector is not None
    return sum(len(connections) for connections in connector._conns.values())  # type: ignore[attr-defined]


def test_a_connection_that_the_worker_closed_costs_no_attempt(model: Path) -> None:
    """The worker is gone and back on the same port; the gateway finds out with the next request."""
    with stub_system(model, ["decode"], poll_s=0.05, max_attempts=1) as stubs:
        stubs.says("a b c")
        decode, server = stubs.workers[0], stubs.servers[0]
        assert stubs.complete().status_code == 200
        stubs.wait(lambda: pooled(stubs) == 1, "the connection is kept")
        decode.plan.append(Behaviour(reset_before_answer=True))
        assert stubs.complete().status_code == 200, "once more on a fresh connection"
        assert [call.ended for call in decode.calls] == ["finished", "broken", "finished"]
        assert server.port


def test_answers_that_were_read_to_the_end_share_connections(model: Path) -> None:
    with stub_system(model, ["prefill", "decode"]) as stubs:
        stubs.says("a b c")
        for _ in range(20):
            assert stubs.complete().status_code == 200
        stubs.wait(lambda: pooled(stubs) == 2, "one connection a worker")


def test_a_worker_that_falls_silent_loses_its_requests(model: Path) -> None:
    """Its process is stopped, not dead: no connection breaks, nothing is answered any more."""
    with stub_system(model, ["decode", "decode"], poll_s=0.05, poll_timeout_s=0.2, lost_after_s=0.5) as stubs:
        stubs.says("a b c d e f g")
        first, second = stubs.workers
        first.plan.append(Behaviour(hold_after=(3, stubs.gate())))
        original = first.info

        def silent() -> None:
            raise ConnectionAbortedError("no answer")

        async def fall_silent() -> None:
            first.info = silent  # type: ignore[method-assign,assignment]

        stubs.thread.run(fall_silent())
        answer = stubs.complete(max_tokens=50).json()["choices"][0]
        assert answer["text"] == "a b c d e f g"
        assert second.calls
        first.info = original  # type: ignore[method-assign]
        stubs.wait(lambda: len(stubs.gateway.cluster.workers()) == 2, "it is back")


def test_a_wrong_secret_is_seen_as_an_unusable_worker(model: Path) -> None:
    with stub_system(model, ["decode"]) as stubs:
        stubs.workers[0].secret = "another secret altogether"
        stubs.wait(lambda: not stubs.gateway.cluster.workers(), "unusable")
        assert stubs.complete().status_code == 503
        (described,) = stubs.gateway.cluster.describe()
        assert "401" in described["problem"]


def test_requests_that_come_and_go_leave_no_tasks_behind(model: Path) -> None:
    import asyncio

    async def num_tasks() -> int:
        return len(asyncio.all_tasks())

    with stub_system(model, ["prefill", "decode"], poll_s=0.05) as stubs:
        stubs.says("a b c d e f")
        before = stubs.thread.run(num_tasks())
        for number in range(60):
            if number % 3 == 0:
                stubs.of_role("decode")[0].plan.append(Behaviour(cut_after=number % 4))
            if number % 5 == 0:
                stubs.of_role("prefill")[0].plan.append(Behaviour(cut_after=0))
            assert stubs.complete(stream=number % 2 == 0).status_code == 200
        stubs.assert_idle()
        # Idle connections and polls come and go by a few; sixty requests would show.
        stubs.wait(lambda: stubs.thread.run(num_tasks()) <= before + 6, "tasks are back to where they were")
