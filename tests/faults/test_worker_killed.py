"""A worker that dies with requests in flight: they finish elsewhere or end with an error, and the others go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, running
from tests.support.tiny_model import make_tiny_model

NUM_OUTPUT = 48


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny", hidden=128, layers=4)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def body(i: int) -> dict[str, Any]:
    prompt = [10 + (i * 37 + k * 11) % 300 for k in range(120 + i)]
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT,
        "temperature": 0.8,
        "seed": i,
        "ignore_eos": True,
    }


def send(cluster: Cluster, pool: ThreadPoolExecutor, count: int) -> list[Future[Any]]:
    return [pool.submit(cluster.post, "/v1/completions", body(i)) for i in range(count)]


def texts(futures: list[Future[Any]]) -> list[str]:
    answers = [future.result(timeout=90) for future in futures]
    assert [answer.status_code for answer in answers] == [200] * len(answers), [a.text for a in answers]
    for answer in answers:
        assert answer.json()["usage"]["completion_tokens"] == NUM_OUTPUT
    return [answer.json()["choices"][0]["text"] for answer in answers]


FLAGS = ["--num-blocks", "400", "--max-batch-tokens", "64", "--max-num-seqs", "16"]


def wait_for_work(cluster: Cluster, role: str) -> None:
    """Until a worker of the role has requests in hand: bounded, by asking it."""
    for _ in range(2000):
        if any(worker.info().num_requests for worker in cluster.of_role(role)):
            return
    raise AssertionError(f"no {role} worker ever had work")


@pytest.mark.parametrize("roles", [["prefill", "prefill", "decode"], ["prefill", "decode"]])
def test_requests_of_a_killed_prefill_worker_finish_with_the_same_text(
    model: Path, pool: ThreadPoolExecutor, roles: list[str]
) -> None:
    with running(
        model,
        roles,
        worker_flags={"prefill": FLAGS, "decode": FLAGS},
        gateway_flags=["--local-prefill-max-tokens", "0"],
    ) as cluster:
        undisturbed = texts(send(cluster, pool, 12))
        futures = send(cluster, pool, 12)
        wait_for_work(cluster, "prefill")
        cluster.of_role("prefill")[0].send(signal.SIGKILL)
        assert texts(futures) == undisturbed
        assert texts(send(cluster, pool, 2)) == undisturbed[:2], "the next requests are served"
        cluster.assert_idle()


def test_streams_of_a_killed_decode_worker_go_on_elsewhere_without_a_seam(
    model: Path, pool: ThreadPoolExecutor
) -> None:
    with running(
        model,
        ["prefill", "decode", "decode"],
        worker_flags={"prefill": FLAGS, "decode": FLAGS},
        gateway_flags=["--local-prefill-max-tokens", "0"],
    ) as cluster:
        undisturbed = texts(send(cluster, pool, 12))
        futures = send(cluster, pool, 12)
        wait_for_work(cluster, "decode")
        cluster.of_role("decode")[0].send(signal.SIGKILL)
        assert texts(futures) == undisturbed
        cluster.assert_idle()


def test_a_worker_restarted_on_its_port_is_used_again_at_once(model: Path, pool: ThreadPoolExecutor) -> None:
    with running(
        model,
        ["prefill", "decode"],
        worker_flags={"prefill": FLAGS, "decode": FLAGS},
        gateway_flags=["--local-prefill-max-tokens", "0"],
    ) as cluster:
        undisturbed = texts(send(cluster, pool, 3))
        for worker in cluster.workers:
            before = worker.info().incarnation
            worker.send(signal.SIGKILL)
            worker.wait()
            worker.start()
            worker.wait_ready()
            assert worker.info().incarnation != before
            cluster.gateway.wait_ready()
            assert texts(send(cluster, pool, 3)) == undisturbed
            cluster.assert_idle()


def test_sigterm_lets_running_requests_end_and_exits_with_zero(model: Path, pool: ThreadPoolExecutor) -> None:
    with running(model, ["prefill", "decode"], worker_flags={"prefill": FLAGS, "decode": FLAGS}) as cluster:
        futures = send(cluster, pool, 6)
        wait_for_work(cluster, "decode")
        cluster.gateway.send(signal.SIGTERM)
        assert all(future.result(timeout=60).status_code in (200, 503) for future in futures)
        assert cluster.gateway.wait() == 0
        cluster.assert_idle()
