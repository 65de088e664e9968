"""Bodies that are too large, too deep, too slow or broken: refused for what they are, while others are served."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.stub_system import StubSystem, stub_system
from tests.support.text_model import make_text_model


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m", context_tokens=2000)
    with stub_system(model, ["decode"], max_body_bytes=8 << 20, body_timeout_s=1.0) as system:
        system.says("fine")
        yield system


@pytest.fixture(autouse=True)
def the_next_request_is_served(stubs: StubSystem) -> Iterator[None]:
    stubs.of_role("decode")[0].calls.clear()
    yield
    assert stubs.complete().json()["choices"][0]["text"] == "fine"
    stubs.assert_idle()


def forbid_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(_: bytes) -> None:
        raise AssertionError("the body was parsed")

    monkeypatch.setattr("services.gateway.json_body.decode_object", parsed)


def test_27_mb_are_refused_unparsed(stubs: StubSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        forbid_parsing(patched)
        refused = stubs.complete(prompt="a" * (27 << 20))
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


def test_a_body_without_a_length_is_counted_as_it_comes(stubs: StubSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        forbid_parsing(patched)
        body = (b" " * 65536 for _ in range(200))
        refused = httpx.post(stubs.url + "/v1/chat/completions", content=body, timeout=20)
    assert refused.status_code == 413


def test_who_asks_first_is_told_before_sending_anything(stubs: StubSystem) -> None:
    host, port = stubs.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_probes_are_answered_while_a_large_prompt_is_tokenised(
    stubs: StubSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held on a pool thread in the tokenizer: the event loop goes on serving."""
    entered, release = threading.Event(), threading.Event()
    text = stubs.gateway.text
    original = text.text_prompt

    def held(prompt: str, max_tokens: int | None, **options: bool) -> list[int]:
        entered.set()
        assert release.wait(20)
        return original(prompt, max_tokens, **options)

    monkeypatch.setattr(text, "text_prompt", held)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(stubs.complete(prompt="slow")))
    thread.start()
    assert entered.wait(10)
    for path in ("/health", "/ready", "/v1/models", "/metrics"):
        assert httpx.get(stubs.url + path, timeout=5).status_code == 200
    release.set()
    thread.join(20)
    assert answers[0].status_code == 200


def test_a_prompt_far_beyond_the_context_is_refused_untokenised(
    stubs: StubSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenised(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("tokenised")

    with monkeypatch.context() as patched:
        patched.setattr(stubs.gateway.text.tokenizer, "encode", tokenised)
        for path, body in (
            ("/v1/completions", {"prompt": "word " * 1_000_000}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 1_000_000}]}),
        ):
            refused = stubs.post(path, {"model": "stub"} | body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
            assert "2000 tokens" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'{"model": "stub", "prompt": "a", "temperature": NaN}',
        b'{"model": "stub", "prompt": "\xff\xfe"}',
        b'{"model": "stub", "prompt": "\\ud800"}',
        b'{"a":' * 500_000,
        b"[" * 1_000_000,
        b'{"model": "stub", "prompt": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_json_request_is_a_400(stubs: StubSystem, body: bytes) -> None:
    response = httpx.post(stubs.url + "/v1/completions", content=body, timeout=20)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_compressed_bodies_are_not_unpacked(stubs: StubSystem) -> None:
    response = httpx.post(stubs.url + "/v1/completions", content=b"x", headers={"content-encoding": "gzip"})
    assert response.status_code == 415


def test_a_body_that_does_not_come_is_given_up_on(stubs: StubSystem) -> None:
    host, port = stubs.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert sock.recv(100).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("name", ["x-kvbaton-decode", "x-prefiller-host-port", "authorization", "x-request-id"])
def test_no_header_reaches_a_worker(stubs: StubSystem, name: str) -> None:
    response = stubs.complete()
    headed = stubs.post("/v1/completions", {"model": "stub", "prompt": "a"}, headers={name: "http://127.0.0.1:1"})
    assert response.status_code == headed.status_code == 200


@pytest.mark.parametrize("field", ["handoff", "reservation", "kv_transfer_params", "cache_domain", "fabric_address"])
def test_fields_of_the_inner_protocol_are_refused(stubs: StubSystem, field: str) -> None:
    response = stubs.complete(**{field: {"a": 1}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert not stubs.of_role("decode")[0].calls


def test_a_bad_request_is_refused_without_a_worker(stubs: StubSystem) -> None:
    for fields in ({"n": 3_000_000}, {"logprobs": 10**9}, {"stop": ["x"] * 400_000}, {"prompt": [2**40]}):
        assert stubs.complete(**fields).status_code == 400
    assert not stubs.of_role("decode")[0].calls


def test_many_broken_clients_leave_the_gateway_whole(stubs: StubSystem) -> None:
    host, port = stubs.url.removeprefix("http://").split(":")
    for garbage in (
        b"\x16\x03\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n\r\n" * 3,
        b"\0" * 9,
    ):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(garbage)
    body = json.dumps({"model": "stub", "prompt": "a"})
    assert httpx.post(stubs.url + "/v1/completions", content=body).status_code == 200
