"""Handoffs that are given up at a bad moment, over small pools: blocks come back at once, and what late messages and
late bytes belonged to is never touched again."""

from __future__ import annotations

import http.client
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, WorkerProcess, running, wait_until
from tests.support.load import Load, ask, body, undisturbed
from tests.support.tiny_model import make_tiny_model

SOON_S = 1.0
SMALL = ["--num-blocks", "24", "--max-batch-tokens", "64", "--max-num-seqs", "8", "--test-faults", ""]
SMALL += ["--max-segment-bytes", "16384", "--no-prefix-caching", "--fabric-silence-s", "3"]
ALWAYS_HAND_OFF = ["--local-prefill-max-tokens", "0"]
NUM_OUTPUT = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128, layers=4)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, str]:
    """From one worker that does everything, with room for everything, and no prefix cache."""
    flags = {"both": ["--num-blocks", "400", "--no-prefix-caching"]}
    with running(model, ["both"], worker_flags=flags) as cluster:
        return undisturbed(cluster, range(40), NUM_OUTPUT)


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker whose pools hold two requests."""
    flags = {"prefill": SMALL, "decode": SMALL}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        yield cluster


@pytest.fixture
def pair(small: Cluster) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    yield small.of_role("prefill")[0], small.of_role("decode")[0]
    for worker in small.workers:
        worker.put("/debug/faults", "").raise_for_status()
    small.assert_idle()


def right(cluster: Cluster, expected: dict[int, str], number: int) -> None:
    answer = ask(cluster, body(number, NUM_OUTPUT))
    assert answer.error is None, answer.error
    assert answer.text == expected[number]


class Caller:
    """A client that leaves when told, without having read anything."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._connection = http.client.HTTPConnection(cluster.gateway.url.removeprefix("http://"), timeout=30)
        request = json.dumps(body(number, NUM_OUTPUT))
        self._connection.request("POST", "/v1/completions", request, {"content-type": "application/json"})

    def leave(self) -> None:
        self._connection.close()


def test_late_bytes_of_a_request_that_was_given_up_reach_nobody(
    small: Cluster, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    """Its segments leave two seconds late; meanwhile its blocks belong to others."""
    prefill, decode = pair
    prefill.put("/debug/faults", "delay:segment:1:2,delay:segment:2:2,delay:segment:3:2")
    before = decode.ledger()["receiver"]
    client = Caller(small, 0)
    wait_until(lambda: decode.ledger()["receiver"]["states"]["receiving"]["count"], "A is on its way", decode)
    client.leave()
    wait_until(lambda: not decode.ledger()["blocks"]["reserved"], "its blocks are free", decode)
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(right, small, expected, number) for number in (1, 2, 3, 4)]:
            done.result(60)
    after = decode.ledger()["receiver"]
    assert after["cancelled"] > before["cancelled"]
    late = after["late"] + after["unknown"] - before["late"] - before["unknown"]
    assert late > 0, "the late messages came, were counted and dropped"


def test_a_segment_that_cannot_be_posted_is_known_at_once_fifty_times(
    small: Cluster, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    prefill, decode = pair
    before = decode.ledger()["receiver"]
    for turn in range(50):
        prefill.put("/debug/faults", "fail:segment:2")
        right(small, expected, turn % 8)
    after = decode.ledger()["receiver"]
    # By the fabric, or by the gateway that prefill told first.
    ended = sum(after[name] - before[name] for name in ("failed", "cancelled"))
    assert ended >= 40, "decode was told each time, and did not wait"


def test_damaged_bytes_are_sent_again_and_when_that_does_not_help_the_prompt_is_computed_elsewhere(
    small: Cluster, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    prefill, decode = pair
    before = decode.ledger()["receiver"]
    prefill.put("/debug/faults", "corrupt:segment:1")
    right(small, expected, 1)
    after = decode.ledger()["receiver"]
    assert (after["damaged"] - before["damaged"], after["committed"] - before["committed"]) == (1, 1)
    prefill.put("/debug/faults", "corrupt:segment:*")
    right(small, expected, 2)
    (record, *_) = small.records()
    assert [attempt["path"] for attempt in record["attempts"]] == ["pair", "local"]
    assert "damaged" in record["attempts"][0]["outcome"]
    assert "arrived damaged from" in decode.output(), "the log says where"


def test_the_client_leaves_and_prefill_dies_at_the_same_moment(
    small: Cluster, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    prefill, decode = pair
    prefill.put("/debug/faults", "delay:commit:*:5")
    client = Caller(small, 5)
    wait_until(lambda: decode.ledger()["receiver"]["states"]["receiving"]["count"], "it is on its way", decode)
    client.leave()
    prefill.send(signal.SIGKILL)
    prefill.wait()
    wait_until(lambda: decode.ledger()["blocks"]["free"] == 24, "every block is free", decode)
    prefill.start()
    prefill.wait_ready()
    small.wait_usable()
    right(small, expected, 5)


def test_twenty_refusals_in_a_row_hold_nothing_on_prefill(
    small: Cluster, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    """Decode has room for two; the others are refused, many times over, before prefill hears of them."""
    prefill, _ = pair
    with ThreadPoolExecutor(20) as pool:
        for done in [pool.submit(right, small, expected, number % 10) for number in range(20)]:
            done.result(90)
    wait_until(lambda: prefill.ledger()["blocks"]["held"] == 0, "nothing is held", prefill)
    right(small, expected, 20)


def test_a_prompt_that_waits_longer_than_the_lease_keeps_its_reservation(model: Path, expected: dict[int, str]) -> None:
    flags = {"prefill": [*SMALL, "--max-batch-tokens", "32"], "decode": SMALL}
    gateway = [*ALWAYS_HAND_OFF, "--lease-s", "1"]
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=gateway) as cluster:
        cluster.of_role("prefill")[0].put("/debug/faults", "pause:step:*:1")
        right(cluster, expected, 4)
        (record, *_) = cluster.records()
        assert [attempt["path"] for attempt in record["attempts"]] == ["pair"], "the lease was renewed meanwhile"
        cluster.assert_idle()


def test_a_reservation_whose_lease_ran_out_is_not_decoded_from(model: Path, expected: dict[int, str]) -> None:
    """Decode stands still for longer than its leases; prefill is given up by nobody and ships all the same."""
    flags = {"prefill": SMALL, "decode": SMALL}
    gateway = [*ALWAYS_HAND_OFF, "--lease-s", "1", "--lost-after-s", "20"]
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=gateway) as cluster:
        prefill, decode = cluster.workers
        prefill.put("/debug/faults", "drop:renew:*,delay:commit:1:3")
        right(cluster, expected, 4)
        (record, *_) = cluster.records()
        assert len(record["attempts"]) > 1, "the first attempt ended with its lease"
        assert "lease" in record["attempts"][0]["outcome"]
        prefill.put("/debug/faults", "")
        assert decode.ledger()["receiver"]["failed"] == 1
        cluster.assert_idle()


def test_a_prompt_that_prefill_cannot_hold_is_computed_by_decode(model: Path, expected: dict[int, str]) -> None:
    flags = {"prefill": [*SMALL, "--max-model-len", "64"], "decode": SMALL}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        right(cluster, expected, 3)
        (record, *_) = cluster.records()
        assert [attempt["path"] for attempt in record["attempts"]] == ["local"]
        cluster.assert_idle()


def test_kv_of_another_dtype_is_never_shipped_and_the_field_is_named(model: Path, expected: dict[int, str]) -> None:
    flags = {"prefill": [*SMALL, "--dtype", "bfloat16"], "decode": [*SMALL, "--dtype", "float32"]}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        right(cluster, expected, 3)
        (record, *_) = cluster.records()
        assert "dtype differs" in record["prefill"]["why_local"]


def test_a_request_is_shipped_once_and_recomputed_after_a_preemption(model: Path, expected: dict[int, str]) -> None:
    """Two long outputs in a decode pool that holds one and a half."""
    flags = {"prefill": SMALL, "decode": [*SMALL, "--num-blocks", "15"]}
    with running(model, ["prefill", "decode"], worker_flags=flags, gateway_flags=ALWAYS_HAND_OFF) as cluster:
        decode = cluster.of_role("decode")[0]
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(right, cluster, expected, number) for number in (0, 5)]:
                done.result(60)
        assert decode.ledger()["receiver"]["committed"] == 2
        cluster.assert_idle()


def test_thirty_sessions_in_a_pool_for_two_keep_apart(
    small: Cluster, model: Path, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    """Every round evicts every prefix: what is hit is never another session's."""
    cached = [flag for flag in SMALL if flag != "--no-prefix-caching"]
    with running(
        model,
        ["prefill", "decode"],
        worker_flags={"prefill": cached, "decode": cached},
        gateway_flags=ALWAYS_HAND_OFF,
    ) as cluster:
        with Load(cluster, 6, {n: expected[n] for n in range(30)}, NUM_OUTPUT) as load:
            load.wait_for(90)
        load.assert_right()
        cluster.assert_idle()


def test_after_every_client_has_left_the_gauges_are_at_zero(
    small: Cluster, pair: tuple[WorkerProcess, WorkerProcess], expected: dict[int, str]
) -> None:
    _, decode = pair
    aborted = decode.ledger()["finished"]["abort"]
    decode.put("/debug/faults", "pause:step:*:0.1")
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(ask, small, body(number, NUM_OUTPUT), 3) for number in range(5)]
        assert all(answer.result(60).hung_up for answer in answers)
    small.assert_idle()
    ledger = decode.ledger()
    assert ledger["finished"]["abort"] - aborted == 5
    page = decode.get("/metrics").text
    for state in ("running", "waiting", "reserved", "held"):
        assert f'kvbaton_engine_requests{{state="{state}"}} 0.0' in page
    assert "kvbaton_open_leases 0.0" in page
