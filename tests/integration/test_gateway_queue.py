"""Busy workers: requests wait in order of arrival, within bounds, and are served as soon as there is room."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def queue_up(stubs: StubSystem, pool: ThreadPoolExecutor, count: int) -> list[Future[httpx.Response]]:
    """Requests that arrive one after another; each is known by its prompt."""
    futures = []
    for number in range(count):
        futures.append(pool.submit(stubs.complete, prompt=[10 + number], max_tokens=5))
        stubs.wait(lambda number=number: stubs.gateway.admission.num_queued == number + 1, "queued")  # type: ignore[misc]
    return futures


def test_the_queue_is_first_come_first_served(model: Path, pool: ThreadPoolExecutor) -> None:
    with stub_system(model, ["prefill", "decode"], busy_retry_s=60.0) as stubs:
        stubs.says("a b c d e f")
        decode = stubs.of_role("decode")[0]
        decode.max_running = 1
        gate = stubs.gate()
        decode.plan.append(Behaviour(hold_after=(2, gate)))
        holder = pool.submit(stubs.complete, prompt=[5], max_tokens=5)
        stubs.wait(lambda: decode.num_running == 1, "the only place is taken")
        waiting = queue_up(stubs, pool, 6)
        gate.open()
        assert [future.result(20).status_code for future in (holder, *waiting)] == [200] * 7
        order = [call.request.work.prompt_token_ids[0] for call in decode.calls]
        assert order == [5, 10, 11, 12, 13, 14, 15]


def test_without_any_sign_the_workers_are_asked_again(model: Path, pool: ThreadPoolExecutor) -> None:
    """Others may share the workers: room can appear without anything of ours having ended."""
    with stub_system(model, ["decode"], busy_retry_s=0.02) as stubs:
        stubs.says("a")
        decode = stubs.of_role("decode")[0]
        decode.max_running = 0
        waiting = queue_up(stubs, pool, 2)
        stubs.wait(lambda: decode.num_busy >= 3, "asked again and again")
        decode.max_running = None
        assert [future.result(20).status_code for future in waiting] == [200, 200]


def test_a_full_queue_says_when_to_come_back(model: Path, pool: ThreadPoolExecutor) -> None:
    with stub_system(model, ["decode"], max_queued_requests=1, busy_retry_s=0.02) as stubs:
        stubs.says("a")
        decode = stubs.of_role("decode")[0]
        decode.max_running = 0
        waiting = queue_up(stubs, pool, 1)
        refused = stubs.complete()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        decode.max_running = None
        assert waiting[0].result(20).status_code == 200


def test_waiting_ends_with_the_requests_own_deadline(model: Path) -> None:
    with stub_system(model, ["decode"], request_timeout_s=0.3, busy_retry_s=0.02) as stubs:
        stubs.of_role("decode")[0].max_running = 0
        refused = stubs.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_busy_worker_is_passed_over_for_a_free_one(model: Path) -> None:
    with stub_system(model, ["prefill", "prefill", "decode", "decode"], busy_retry_s=60.0) as stubs:
        stubs.says("a b c")
        for role in ("prefill", "decode"):
            stubs.of_role(role)[0].max_running = 0  # type: ignore[arg-type]
        assert stubs.complete().status_code == 200
        assert [worker.num_busy for worker in stubs.workers] == [1, 0, 2, 0]
        assert len(stubs.of_role("decode")[1].calls) == 2, "the reservation that no prefill worker used was let go"


def test_prefill_without_room_is_waited_for(model: Path, pool: ThreadPoolExecutor) -> None:
    """No attempt is used up by it, and no decode worker is held meanwhile."""
    with stub_system(model, ["prefill", "decode"], busy_retry_s=0.02, max_attempts=1) as stubs:
        stubs.says("a b c")
        prefill, decode = stubs.workers
        prefill.max_running = 0
        future = pool.submit(stubs.complete)
        stubs.wait(lambda: prefill.num_busy >= 4, "asked again and again")
        prefill.max_running = None
        assert future.result(20).status_code == 200
        assert all(call.ended in ("cancelled", "finished") for call in decode.calls)


def test_a_gateway_that_drains_takes_nothing_new_and_finishes_what_it_has(
    model: Path, pool: ThreadPoolExecutor
) -> None:
    with stub_system(model, ["decode"]) as stubs:
        stubs.says("a b c")
        gate = stubs.gate()
        decode = stubs.of_role("decode")[0]
        decode.plan.append(Behaviour(hold_after=(1, gate)))
        running = pool.submit(stubs.complete)
        stubs.wait(lambda: decode.num_running == 1, "in flight")
        assert httpx.get(stubs.url + "/ready").status_code == 200
        stubs.gateway.drain()
        assert httpx.get(stubs.url + "/ready").status_code == 503
        refused = stubs.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gate.open()
        assert running.result(20).status_code == 200


def test_without_a_decode_worker_nothing_is_accepted(model: Path) -> None:
    with stub_system(model, ["prefill", "decode"]) as stubs:
        stubs.of_role("decode")[0].state = "loading"
        stubs.wait(lambda: len(stubs.gateway.cluster.workers()) == 1, "the decode worker is out")
        assert httpx.get(stubs.url + "/ready").status_code == 503
        assert httpx.get(stubs.url + "/health").status_code == 200
        refused = stubs.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        stubs.of_role("decode")[0].state = "ready"
        stubs.wait(lambda: len(stubs.gateway.cluster.workers()) == 2, "it is back")
        stubs.says("a")
        assert stubs.complete().status_code == 200


def test_workers_whose_kv_differs_are_not_paired_and_the_field_is_told(model: Path) -> None:
    with stub_system(model, ["prefill", "decode"]) as stubs:
        stubs.says("a b c")
        prefill, decode = stubs.workers
        fields = {name: getattr(prefill.fingerprint, name) for name in prefill.fingerprint.__struct_fields__}
        prefill.fingerprint = type(prefill.fingerprint)(**fields | {"dtype": "bfloat16"})
        seen = prefill.num_infos
        stubs.wait(lambda: prefill.num_infos > seen + 1, "the gateway has looked again")
        record = stubs.record(stubs.complete())
        assert "dtype" in record["prefill"]["why_local"]
        assert not prefill.calls
        assert decode.calls[0].request.handoff is None
