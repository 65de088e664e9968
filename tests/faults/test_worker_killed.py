"""A worker that dies with requests in flight: they finish elsewhere with the same text, and the others go on."""

from __future__ import annotations

import functools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster, running, wait_until
from tests.support.tiny_model import make_tiny_model

NUM_REQUESTS = 8
NUM_OUTPUT = 200
FLAGS = ["--num-blocks", "400", "--max-batch-tokens", "64", "--max-num-seqs", "16"]
FLAGS += ["--test-faults", "pause:step:*:0.005"]  # streams are still running when something happens to them
ALWAYS_HAND_OFF = ["--local-prefill-max-tokens", "0"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", hidden=128, layers=4)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_REQUESTS) as executor:
        yield executor


def body(i: int) -> dict[str, Any]:
    prompt = [10 + (i * 37 + k * 11) % 300 for k in range(120 + i)]
    sampling = {"max_tokens": NUM_OUTPUT, "temperature": 0.8, "seed": i, "ignore_eos": True, "presence_penalty": 0.5}
    return {"model": "tiny", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | sampling


def stream(cluster: Cluster, i: int, on_event: Callable[[], None]) -> tuple[str, dict[str, Any]]:
    """The text and the usage of one streamed answer, which must end as it should."""
    text, usage, reasons = "", {}, []
    with httpx.stream("POST", cluster.gateway.url + "/v1/completions", json=body(i), timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event["usage"] or usage
            for choice in event["choices"]:
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            on_event()
    assert reasons == ["length"]
    return text, usage


def send(
    cluster: Cluster, pool: ThreadPoolExecutor, on_event: Callable[[int], None] = lambda _: None
) -> list[Future[Any]]:
    return [pool.submit(stream, cluster, i, functools.partial(on_event, i)) for i in range(NUM_REQUESTS)]


def texts(futures: list[Future[Any]]) -> list[str]:
    answers = [future.result(timeout=150) for future in futures]
    assert [usage["completion_tokens"] for _, usage in answers] == [NUM_OUTPUT] * len(answers)
    return [text for text, _ in answers]


class Events:
    """Lets a test wait until so many events of every stream have come: each of them is running then."""

    def __init__(self, wanted: int) -> None:
        self._left = dict.fromkeys(range(NUM_REQUESTS), wanted)
        self._lock = threading.Lock()
        self._enough = threading.Event()

    def __call__(self, stream_number: int) -> None:
        with self._lock:
            self._left[stream_number] -= 1
            if max(self._left.values()) <= 0:
                self._enough.set()

    def wait(self) -> None:
        assert self._enough.wait(60), "the streams did not get so far"


@pytest.mark.parametrize("roles", [["prefill", "prefill", "decode"], ["prefill", "decode"]])
def test_requests_of_a_killed_prefill_worker_finish_with_the_same_text(
    model: Path, pool: ThreadPoolExecutor, roles: list[str]
) -> None:
    """Killed while requests are on it: it is stopped first, so that what it was given stays with it."""
    flags = {"prefill": FLAGS, "decode": FLAGS}
    with running(model, roles, worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = texts(send(cluster, pool))
        victim, decode = cluster.of_role("prefill")[0], cluster.of_role("decode")[0]
        victim.send(signal.SIGSTOP)
        futures = send(cluster, pool)
        wait_until(lambda: decode.ledger()["receiver"]["open"] > 0, "a reservation is open", decode)
        victim.send(signal.SIGKILL)
        assert texts(futures) == undisturbed
        assert texts(send(cluster, pool)) == undisturbed, "the next requests are served"
        cluster.assert_idle()


def test_streams_of_a_killed_decode_worker_go_on_elsewhere_without_a_seam(
    model: Path, pool: ThreadPoolExecutor
) -> None:
    flags = {"prefill": FLAGS, "decode": FLAGS}
    roles = ["prefill", "decode", "decode"]
    with running(model, roles, worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = texts(send(cluster, pool))
        events = Events(5)
        futures = send(cluster, pool, events)
        events.wait()
        cluster.of_role("decode")[0].send(signal.SIGKILL)
        assert texts(futures) == undisturbed
        retried = httpx.get(cluster.gateway.admin_url + "/debug/requests", timeout=5).json()
        assert any(len(request["attempts"]) > 1 for request in retried), "the kill hit running streams"
        cluster.assert_idle()


def test_a_worker_restarted_on_its_port_is_used_again(model: Path, pool: ThreadPoolExecutor) -> None:
    flags = {"prefill": FLAGS, "decode": FLAGS}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = texts(send(cluster, pool))
        for worker in cluster.workers:
            before = worker.info().incarnation
            worker.send(signal.SIGKILL)
            worker.wait()
            worker.start()
            worker.wait_ready()
            assert worker.info().incarnation != before
            cluster.wait_usable()
            assert texts(send(cluster, pool)) == undisturbed
            committed = cluster.of_role("decode")[0].ledger()["receiver"]["committed"]
            assert committed >= NUM_REQUESTS, "KV came over the fabric from and to the new process"
            cluster.assert_idle()


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_sigterm_lets_running_requests_end_and_exits_with_zero(
    model: Path, pool: ThreadPoolExecutor, role: str
) -> None:
    flags = {"prefill": FLAGS, "decode": FLAGS}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = texts(send(cluster, pool))
        events = Events(2)
        futures = send(cluster, pool, events)
        events.wait()
        victim = cluster.gateway if role == "gateway" else cluster.of_role(role)[0]
        victim.send(signal.SIGTERM)
        assert texts(futures) == undisturbed
        assert victim.wait() == 0
        cluster.assert_idle()


@pytest.mark.parametrize(("migrate", "path"), [("ship", "moved"), ("recompute", "pair")])
def test_streams_of_a_draining_decode_worker_are_moved_without_a_seam(
    model: Path, pool: ThreadPoolExecutor, migrate: str, path: str
) -> None:
    flags = {"prefill": FLAGS, "decode": [*FLAGS, "--leave-after-s", "0", "--drain-s", "60"]}
    roles, gateway_flags = ["prefill", "decode", "decode"], [*ALWAYS_HAND_OFF, "--migrate", migrate]
    with running(model, roles, worker_flags=flags, gateway_flags=gateway_flags) as cluster:
        undisturbed = texts(send(cluster, pool))
        before = num_attempts(cluster, path)
        events = Events(5)
        futures = send(cluster, pool, events)
        events.wait()
        leaving = cluster.of_role("decode")[0]
        leaving.send(signal.SIGTERM)
        assert texts(futures) == undisturbed
        assert leaving.wait() == 0
        usual = NUM_REQUESTS if path == "pair" else 0
        assert num_attempts(cluster, path) - before > usual, "streams were still running"
        retries = [r for r in cluster.records() if any("lost" in attempt["outcome"] for attempt in r["attempts"])]
        assert not retries
        assert texts(send(cluster, pool)) == undisturbed
        cluster.assert_idle()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_every_choice_of_a_request_goes_on_when_its_decode_worker_ends(model: Path, number: int) -> None:
    flags = {"prefill": FLAGS, "decode": [*FLAGS, "--leave-after-s", "0", "--test-faults", "pause:step:*:0.02"]}
    request = {"model": "tiny", "prompt": [7, 8, 9] * 20, "n": 3, "max_tokens": 60, "temperature": 0.8, "seed": 5}
    with running(model, ["prefill", "decode", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = choices(cluster, request, lambda _: None)
        assert len(set(undisturbed)) == 3, "the choices differ"

        ended = []

        def after(num_events: int) -> None:
            if num_events == 30:
                ended.append(max(cluster.of_role("decode"), key=lambda worker: worker.ledger()["open_streams"]))
                ended[0].send(number)

        assert choices(cluster, request, after) == undisturbed
        ended[0].wait()
        assert num_attempts(cluster, "moved") + num_attempts(cluster, "pair") > 6, "some choice was continued"
        cluster.assert_idle()


def choices(cluster: Cluster, request: dict[str, Any], after: Callable[[int], None]) -> list[str]:
    """The streamed text of each choice."""
    found = [""] * request["n"]
    reasons = []
    stream = cluster.client.completions.create(**request, stream=True, extra_body={"ignore_eos": True})
    for num_events, chunk in enumerate(stream):
        after(num_events)
        for choice in chunk.choices:
            found[choice.index] += choice.text
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert reasons == ["length"] * request["n"]
    return found


def test_a_stream_that_nobody_has_room_for_goes_on_where_it_is(model: Path, pool: ThreadPoolExecutor) -> None:
    """It is held, refused elsewhere, and resumed, several times over."""
    flags = {
        "prefill": FLAGS,
        "decode": [*FLAGS, "--leave-after-s", "0", "--drain-s", "60", "--test-faults", ""],
        "both": ["--num-blocks", "30", "--max-batch-tokens", "64", "--max-num-seqs", "1"],
    }
    roles = ["prefill", "decode", "both"]
    with running(model, roles, worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = texts(send(cluster, pool))
        leaving = cluster.of_role("decode")[0]
        leaving.put("/debug/faults", "pause:step:*:0.03").raise_for_status()
        futures = send(cluster, pool)
        wait_until(lambda: leaving.ledger()["requests"]["running"] >= 3, "streams are running", leaving)
        leaving.send(signal.SIGTERM)
        assert texts(futures) == undisturbed
        assert leaving.wait() == 0
        page = httpx.get(cluster.gateway.admin_url + "/metrics", timeout=5).text
        migrations = [line for line in page.splitlines() if line.startswith("kvbaton_gateway_migrations_total")]
        assert any("resumed" in line for line in migrations), migrations
        cluster.assert_idle()


def test_without_any_prefill_worker_decode_computes_and_one_that_returns_is_used(
    model: Path, pool: ThreadPoolExecutor
) -> None:
    flags = {"prefill": FLAGS, "decode": FLAGS}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        undisturbed = texts(send(cluster, pool))
        prefill = cluster.of_role("prefill")[0]
        prefill.send(signal.SIGKILL)
        prefill.wait()
        for _ in range(3):
            assert texts(send(cluster, pool)) == undisturbed
        assert num_attempts(cluster, "local") >= 2 * NUM_REQUESTS
        prefill.start()
        prefill.wait_ready()
        cluster.wait_usable()
        before = num_attempts(cluster, "pair")
        assert texts(send(cluster, pool)) == undisturbed
        assert num_attempts(cluster, "pair") == before + NUM_REQUESTS
        cluster.assert_idle()


def num_attempts(cluster: Cluster, path: str) -> int:
    return sum(attempt["path"] == path for record in cluster.records() for attempt in record["attempts"])
