"""A gateway with API keys: nothing without one, nothing beyond what one may, and TLS and CORS by flag."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from services.gateway import tls
from services.gateway.app import create_public_app
from services.gateway.main import public_options
from services.gateway.tenants.guard import OPEN_PATHS
from services.gateway.tenants.keys import hash_key, new_key
from tests.support.stub_system import Server, StubSystem, stub_system
from tests.support.stub_worker import Behaviour
from tests.support.text_model import make_text_model

KEYS = {name: new_key() for name in ("free", "other", "narrow", "slow", "thrifty", "single", "salted")}
ENTRIES = {
    "free": "",
    "other": "",
    "narrow": 'models = ["another"]',
    "slow": "requests_per_minute = 2",
    "thrifty": "tokens_per_minute = 20",
    "single": "concurrent = 1",
    "salted": 'tenant = "free"\npriority = -1',
}


def keys_text() -> str:
    return "".join(
        f'[[key]]\nname = "{name}"\nhash = "{hash_key(key)}"\n{ENTRIES[name]}\n' for name, key in KEYS.items()
    )


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(keys_text())
    return path


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory, keys_file: Path) -> Iterator[StubSystem]:
    model = make_text_model(tmp_path_factory.mktemp("model") / "m")
    with stub_system(
        model, ["prefill", "decode"], api_keys_file=keys_file, cors_origins=["https://a.example"]
    ) as system:
        system.says("fine")
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


@contextmanager
def client(stubs: StubSystem, name: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=stubs.url + "/v1", api_key=KEYS.get(name, name), max_retries=0, timeout=20) as one:
        yield one


def ask(one: OpenAI, **fields: Any) -> Any:
    return one.completions.create(**{"model": "stub", "prompt": "The capital", "max_tokens": 5} | fields)


def routes(stubs: StubSystem) -> list[tuple[str, str]]:
    app: Any = create_public_app(stubs.gateway)
    while not hasattr(app, "routes"):
        app = getattr(app, "_app", None) or app.app
    return [(method, route.path) for route in app.routes for method in route.methods or ["GET", "POST"]]


def test_every_route_there_is_needs_a_key(stubs: StubSystem) -> None:
    found = routes(stubs)
    assert len(found) > 20
    for method, path in found:
        path = path.replace("{name:path}", "stub")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": KEYS["free"]}):
            status = httpx.request(method, stubs.url + path, headers=headers).status_code
            assert status == (200 if path in OPEN_PATHS else 401), (method, path, headers)
    assert not any(worker.calls for worker in stubs.workers)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/V1/models",
        "/v1/models/",
        "/v1%2Fmodels",
        "/%76%31/models",
        "/v1/../v1/models",
        "/health/../v1/models",
        "/health/",
        "/Health",
        "/ready/x",
        "/nothing",
        "/invocations",
        "/metrics",
        "/openapi.json",
        "/docs",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PURGE"])
def test_no_spelling_of_a_path_gets_around_the_key(stubs: StubSystem, path: str, method: str) -> None:
    host = stubs.url.removeprefix("http://")
    with httpx.Client() as plain:
        request = plain.build_request(method, f"http://{host}/x")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert plain.send(request).status_code == 401


def test_a_wrong_key_is_told_in_each_apis_own_shape(stubs: StubSystem) -> None:
    with client(stubs, "wrong") as one, pytest.raises(openai.AuthenticationError) as refused:
        ask(one)
    assert (refused.value.code, refused.value.type) == ("invalid_api_key", "invalid_request_error")
    assert refused.value.response.headers["www-authenticate"] == "Bearer"
    fields: dict[str, Any] = {"model": "stub", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    wrong, right = (anthropic.Anthropic(base_url=stubs.url, api_key=key, max_retries=0) for key in ("x", KEYS["free"]))
    with wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**fields)
    with right:
        message = right.messages.create(**fields)
    assert message.content[0].text == "fine"


def test_a_key_may_use_its_models_only(stubs: StubSystem) -> None:
    with client(stubs, "narrow") as one:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            ask(one)
        assert refused.value.code == "model_not_allowed"
        assert one.models.list().data == []
        with pytest.raises(openai.NotFoundError):
            one.models.retrieve("stub")
    with client(stubs, "free") as one:
        assert [model.id for model in one.models.list().data] == ["stub"]


def test_requests_per_minute(stubs: StubSystem) -> None:
    with client(stubs, "slow") as one:
        assert [ask(one).choices[0].text for _ in range(2)] == ["fine"] * 2
        with pytest.raises(openai.RateLimitError) as refused:
            ask(one)
        headers = refused.value.response.headers
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(headers["retry-after"]) <= 30
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert one.models.list().data, "looking costs nothing"
    with client(stubs, "free") as one:
        raw = one.completions.with_raw_response.create(model="stub", prompt="a", max_tokens=2)
        assert "x-ratelimit-limit-requests" not in raw.headers


def test_tokens_per_minute(stubs: StubSystem) -> None:
    with client(stubs, "thrifty") as one:
        raw = one.completions.with_raw_response.create(model="stub", prompt=[9] * 15, max_tokens=5)
        assert raw.headers["x-ratelimit-limit-tokens"] == "20"
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) <= 5
        with pytest.raises(openai.RateLimitError, match="tokens per minute"):
            ask(one, prompt=[9] * 15)


def test_streams_at_a_time(stubs: StubSystem) -> None:
    gate = stubs.gate()
    stubs.of_role("decode")[0].plan.append(Behaviour(hold_after=(0, gate)))
    with client(stubs, "single") as one:
        stream = ask(one, stream=True)
        with pytest.raises(openai.RateLimitError, match="at a time"):
            ask(one)
        gate.open()
        assert "".join(chunk.choices[0].text for chunk in stream) == "fine"
        stubs.wait(stubs.gateway.is_idle, "the stream has ended")
        assert ask(one).choices[0].text == "fine"


def test_tenants_share_no_cached_kv(stubs: StubSystem) -> None:
    for name in ("free", "other", "salted"):
        with client(stubs, name) as one:
            ask(one)
    domains = [call.request.work.cache_domain for call in stubs.of_role("prefill")[0].calls]
    assert domains[0] == domains[2], "two keys of one tenant"
    assert domains[0] != domains[1]
    assert b"" not in domains


def test_the_record_of_a_request_names_its_tenant(stubs: StubSystem) -> None:
    with client(stubs, "salted") as one:
        response = one.completions.with_raw_response.create(model="stub", prompt="a", max_tokens=2)
    found = httpx.get(f"{stubs.admin_url}/debug/requests/{response.headers['x-request-id']}").json()
    assert found["tenant"] == "free"


def test_a_new_file_takes_effect_without_a_restart(stubs: StubSystem, keys_file: Path) -> None:
    fresh = new_key()
    with client(stubs, fresh) as one:
        with pytest.raises(openai.AuthenticationError):
            ask(one)
        changed = keys_file.with_suffix(".new")
        changed.write_text(keys_text() + f'[[key]]\nname = "fresh"\nhash = "{hash_key(fresh)}"\n')
        os.replace(changed, keys_file)
        stubs.wait(lambda: stubs.gateway.keys.find(fresh), "the file is read again")  # type: ignore[union-attr]
        assert ask(one).choices[0].text == "fine"


def test_internal_headers_of_clients_reach_nobody(stubs: StubSystem) -> None:
    headers = {
        "authorization": f"Bearer {KEYS['free']}",
        "x-kvbaton-handoff": "evil-marker",
        "x-prefiller-url": "http://evil-marker.example",
        "x-prefiller-host-port": "evil-marker:1",
        "x-forwarded-for": "evil-marker",
    }
    answer = httpx.post(stubs.url + "/v1/completions", headers=headers, json={"model": "stub", "prompt": "a"})
    assert answer.status_code == 200
    for worker in stubs.workers:
        assert worker.calls
        assert all("evil-marker" not in str(call.headers) for call in worker.calls)
    for field in ("kv_transfer_params", "handoff", "reservation", "fabric_address", "worker", "cache_domain"):
        body = {"model": "stub", "prompt": "a", field: {"remote_host": "10.0.0.1"}}
        refused = httpx.post(stubs.url + "/v1/completions", headers=headers, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_pages_of_allowed_origins_may_call(stubs: StubSystem) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    preflight = httpx.options(stubs.url + "/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    refused = httpx.options(stubs.url + "/v1/completions", headers=asked | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers
    answer = httpx.post(stubs.url + "/v1/completions", headers={"origin": "https://a.example"}, json={})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed one for this host, over the one that is there."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls_server(stubs: StubSystem, tmp_path: Path) -> Iterator[Server]:
    """Its certificate is cert.pem and key.pem in tmp_path."""
    if not shutil.which("openssl"):
        pytest.skip("makes its certificate with openssl")
    cert, key = make_certificate(tmp_path)
    config = stubs.gateway.config.model_copy(update={"tls_cert": cert, "tls_key": key})
    server = Server(create_public_app(stubs.gateway), options=public_options(config))
    stubs.thread.run(server.start())
    yield server
    stubs.thread.run(server.stop())


def served_model(server: Server, trusted: str) -> str:
    """Over TLS, by a client that trusts one certificate, in PEM, and no other. Raises httpx.ConnectError."""
    context = ssl.create_default_context(cadata=trusted)
    url = f"https://127.0.0.1:{server.port}/v1/models"
    found = httpx.get(url, headers={"x-api-key": KEYS["free"]}, verify=context)
    return str(found.json()["data"][0]["id"])


def test_the_public_port_speaks_tls_when_told_to(tls_server: Server, tmp_path: Path) -> None:
    assert served_model(tls_server, (tmp_path / "cert.pem").read_text()) == "stub"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{tls_server.port}/v1/models")


def test_a_new_certificate_is_served_without_a_restart_and_a_broken_one_is_not(
    tls_server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 0.0)
    old = (tmp_path / "cert.pem").read_text()
    assert served_model(tls_server, old) == "stub"
    make_certificate(tmp_path)
    new = (tmp_path / "cert.pem").read_text()
    deadline = time.monotonic() + 20
    while True:  # the first look at the files is up to a second away
        try:
            assert served_model(tls_server, new) == "stub"
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline
    with pytest.raises(httpx.ConnectError):
        served_model(tls_server, old)
    (tmp_path / "key.pem").write_text("no key at all")
    assert served_model(tls_server, new) == "stub"
    assert "the TLS certificate stays as it was" in caplog.text
