"""A client that leaves at any moment closes both worker streams at once, and is counted as nothing else."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.support.stub_system import StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m", context_tokens=100_000)
    with stub_system(model, ["prefill", "decode"], stall_timeout_s=1.0) as system:
        system.says("word " * 50)
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


class Client:
    """A bare socket, because HTTP libraries tidy up before they leave."""

    def __init__(self, stubs: StubSystem, *, stream: bool, receive_buffer: int | None = None, **fields: object) -> None:
        host, port = stubs.url.removeprefix("http://").split(":")
        self._socket = socket.socket()
        self._socket.settimeout(10)
        if receive_buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect((host, int(port)))
        body = json.dumps({"model": "stub", "prompt": "a", "max_tokens": 300, "stream": stream} | fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)

    def read_until(self, marker: bytes, count: int = 1) -> None:
        data = b""
        while data.count(marker) < count:
            chunk = self._socket.recv(4096)
            assert chunk, f"closed after {data!r}"
            data += chunk

    def leave(self) -> None:
        self._socket.close()


def closed_count(stubs: StubSystem) -> float:
    return stubs.metric("requests_total", endpoint="completions", outcome="client_closed")


def assert_both_told(stubs: StubSystem, before: float) -> None:
    calls = [call for worker in stubs.workers for call in worker.calls]
    stubs.wait(lambda: all(call.ended == "cancelled" for call in calls), f"cancelled: {calls}")
    assert {call.path for call in calls} == {"/v1/generate", "/v1/prefill"}
    stubs.wait(lambda: closed_count(stubs) == before + 1, "counted as the client's leaving")


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token(stubs: StubSystem, stream: bool) -> None:
    """Prefill computes; decode has reserved and waits for KV."""
    before = closed_count(stubs)
    prefill = stubs.of_role("prefill")[0]
    prefill.plan.append(Behaviour(hold_after=(0, stubs.gate())))
    client = Client(stubs, stream=stream)
    stubs.wait(lambda: prefill.calls, "the request is on both workers")
    client.leave()
    assert_both_told(stubs, before)


def test_while_decode_makes_up_its_mind(stubs: StubSystem) -> None:
    before = closed_count(stubs)
    decode = stubs.of_role("decode")[0]
    decode.plan.append(Behaviour(hold_before_answer=stubs.gate()))
    client = Client(stubs, stream=True)
    stubs.wait(lambda: decode.calls, "the request is on decode")
    client.leave()
    stubs.wait(lambda: decode.calls[0].ended == "cancelled", "decode is told")
    stubs.wait(lambda: closed_count(stubs) == before + 1, "counted")
    assert not stubs.of_role("prefill")[0].calls


def test_during_the_transfer(stubs: StubSystem) -> None:
    """The first token has been shown; decode waits for a commit that never comes."""
    before = closed_count(stubs)
    prefill = stubs.of_role("prefill")[0]

    async def never_committed() -> None:
        if prefill.calls and prefill.calls[-1].num_tokens:
            await stubs.gate().wait()

    prefill.plan.append(Behaviour(hold_after=(1, stubs.gate())))
    client = Client(stubs, stream=True)
    client.read_until(b'"text"')
    client.leave()
    stubs.wait(lambda: stubs.of_role("decode")[0].calls[0].ended != "running", "decode is told")
    stubs.wait(lambda: closed_count(stubs) == before + 1, "counted")


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_middle_of_the_answer(stubs: StubSystem, stream: bool) -> None:
    before = closed_count(stubs)
    decode = stubs.of_role("decode")[0]
    decode.plan.append(Behaviour(hold_after=(5, stubs.gate())))
    client = Client(stubs, stream=stream)
    if stream:
        client.read_until(b"data: ", 2)
    stubs.wait(lambda: decode.calls and decode.calls[0].num_tokens == 5, "in the middle")
    client.leave()
    stubs.wait(lambda: decode.calls[0].ended == "cancelled", "decode is told")
    stubs.wait(lambda: closed_count(stubs) == before + 1, "counted")


def test_while_waiting_in_the_queue(stubs: StubSystem) -> None:
    before = closed_count(stubs)
    decode = stubs.of_role("decode")[0]
    decode.max_running = 0
    try:
        client = Client(stubs, stream=True)
        stubs.wait(lambda: stubs.gateway.admission.num_queued == 1, "queued")
        client.leave()
        stubs.wait(lambda: stubs.gateway.admission.num_queued == 0, "left the queue")
        stubs.wait(lambda: closed_count(stubs) == before + 1, "counted")
    finally:
        decode.max_running = None
    assert not decode.calls


def test_with_half_a_body_sent(stubs: StubSystem) -> None:
    before = closed_count(stubs)
    host, port = stubs.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        stubs.wait(lambda: not stubs.gateway.is_idle(), "the request is being read")
    stubs.wait(lambda: closed_count(stubs) == before + 1, "counted")


def test_a_client_that_stops_reading_is_cut_off(stubs: StubSystem) -> None:
    """Its unread answer does not grow without bound on our side, and the workers are let go."""
    decode = stubs.of_role("decode")[0]
    decode.output = [stubs.tokenizer.encode(" the").ids[0]] * 90_000
    client = Client(stubs, stream=True, receive_buffer=4096, max_tokens=90_000, logprobs=20)
    stubs.wait(lambda: decode.calls and decode.calls[0].ended == "cancelled", "decode is told to stop")
    assert decode.calls[0].num_tokens < 90_000, "the worker was held back before it had made everything"
    stubs.wait(stubs.gateway.is_idle, "let go")
    client.leave()


def test_the_next_request_is_served_as_if_nothing_had_been(stubs: StubSystem) -> None:
    stubs.says("all is well")
    assert stubs.complete(max_tokens=50).json()["choices"][0]["text"] == "all is well"
