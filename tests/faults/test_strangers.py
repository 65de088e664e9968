"""Bytes from strangers on every port of a worker: they are refused or ignored, and harm nobody."""

from __future__ import annotations

import contextlib
import pickle
import random
import socket
from collections.abc import Iterator

import httpx
import pytest

from services import auth
from tests.support.cluster import SECRET, Cluster, running
from tests.support.load import HealthWatch, Load, undisturbed
from tests.support.tiny_model import make_tiny_model

FLAGS = ["--num-blocks", "200", "--max-batch-tokens", "64"]


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('unpickled')",)


JUNK = {
    "pickle": pickle.dumps(Bomb()),
    "truncated msgpack": b"\x84\xa4work\x86\xaarequest_id",
    "four gigabytes announced": b"\xc6\xff\xff\xff\xff" + b"x" * 100,
    "nested a hundred thousand deep": b"\x91" * 100_000,
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "nothing": b"",
    "random": random.Random(1).randbytes(4096),
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, dict[int, str]]]:
    model = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    gateway_flags = ["--local-prefill-max-tokens", "0"]
    with running(
        model, ["prefill", "decode"], worker_flags={"prefill": FLAGS, "decode": FLAGS}, gateway_flags=gateway_flags
    ) as cluster:
        yield cluster, undisturbed(cluster, range(4), 20)


def test_garbage_on_the_fabric_port_harms_no_handoff(system: tuple[Cluster, dict[int, str]]) -> None:
    cluster, expected = system
    decode = cluster.of_role("decode")[0]
    host, _, port = decode.info().fabric_address.rpartition(":")
    rng = random.Random(2)
    sockets = []
    with Load(cluster, 2, expected, 20) as load, HealthWatch([decode.url]) as health:
        for turn in range(60):
            stranger = socket.create_connection((host, int(port)), timeout=5)
            stranger.settimeout(5)
            with contextlib.suppress(OSError):  # it may have been thrown out already
                if turn % 3 == 0:
                    stranger.sendall(rng.randbytes(rng.randint(1, 20_000)))
                elif turn % 3 == 1:
                    stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            sockets.append(stranger)  # half of them stay open and silent
        load.wait_for(8)
        for stranger in sockets:
            stranger.close()
        load.wait_for(4)
    load.assert_right()
    health.assert_prompt()
    cluster.assert_idle()


@pytest.mark.parametrize("name", JUNK)
@pytest.mark.parametrize("path", ["/v1/generate", "/v1/prefill", "/v1/hold", "/v1/ship"])
def test_garbage_in_a_body_is_a_400_and_without_the_token_a_401(
    system: tuple[Cluster, dict[int, str]], path: str, name: str
) -> None:
    cluster, _ = system
    worker = cluster.of_role("prefill" if path == "/v1/prefill" else "decode")[0]
    token = dict(auth.request_headers(SECRET))
    for headers, status in ((token, 400), ({}, 401), ({"authorization": "Bearer wrong"}, 401)):
        answer = httpx.post(worker.url + path, content=JUNK[name], headers=headers, timeout=10)
        assert answer.status_code == status, answer.text


def test_a_body_that_never_ends_is_cut_off_at_the_limit(system: tuple[Cluster, dict[int, str]]) -> None:
    worker = system[0].of_role("decode")[0]

    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(1 << 20)

    with contextlib.suppress(httpx.WriteError):  # cut off while it was still being sent
        answer = httpx.post(
            worker.url + "/v1/generate", content=endless(), headers=dict(auth.request_headers(SECRET)), timeout=20
        )
        assert answer.status_code == 400
        assert "over the limit" in answer.text
    assert worker.get("/health").status_code == 200


def test_every_path_but_the_probes_needs_the_token(system: tuple[Cluster, dict[int, str]]) -> None:
    cluster, expected = system
    for worker in cluster.workers:
        for path in ("/v1/worker", "/debug/ledger", "/debug/faults", "//v1/worker", "/V1/worker", "/nothing", "/"):
            assert httpx.get(worker.url + path, timeout=5).status_code == 401, path
        assert worker.get("/debug/faults").status_code == 404, "no faults without the setting"
        for path in ("/health", "/ready", "/metrics"):
            assert httpx.get(worker.url + path, timeout=5).status_code == 200
    with Load(cluster, 1, expected, 20) as load:
        load.wait_for(2)
    load.assert_right()
