"""docs/api.md is true: its tables hold what the gateway holds and what clients can send, and name tests that exist.

What is refused there is sent to a real gateway and refused by name; what is ignored there changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anthropic.types as claude
import httpx
import msgspec
import openai.types as openai
import pytest
from openai.types import chat, responses

from tests.integration.test_gateway_tenants import routes
from tests.support.cluster import ROOT
from tests.support.stub_system import StubSystem, stub_system
from tests.support.text_model import make_text_model

STATES = {"supported", "refused", "ignored"}
MESSAGES = [{"role": "user", "content": "Hi"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "stub", "messages": MESSAGES},
    "/v1/completions": {"model": "stub", "prompt": "Hi"},
    "/v1/responses": {"model": "stub", "input": "Hi"},
    "/v1/messages": {"model": "stub", "messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"model": "stub", "messages": MESSAGES},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
"""A body that each endpoint takes."""
SENT: dict[str, Any] = {
    "best_of": 5,
    "echo": True,
    "suffix": " and so on",
    "metadata": {"a": "b"},
    "stop": ["a"],
    "guided_decoding_backend": "xgrammar",
    "skip_special_tokens": False,
    "store": True,
    "cache_control": {"type": "ephemeral"},
    "truncation_side": "right",
}
"""What a client could mean; an object where nothing stands here."""


@dataclass(frozen=True)
class Row:
    paths: tuple[str, ...]
    names: tuple[str, ...]
    state: str
    tests: tuple[str, ...]


def read_rows() -> list[Row]:
    """Of all tables below a heading of endpoints (or, for the table of endpoints, of none)."""
    rows: list[Row] = []
    paths: tuple[str, ...] = ()
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if line.startswith("#"):
            paths = tuple(re.findall("`(.*?)`", line))
        elif line.startswith("| `"):
            first, state, _, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            rows.append(Row(paths, tuple(re.findall("`(.*?)`", first)), state, tuple(tests.split(", "))))
    return rows


ROWS = read_rows()
ENDPOINTS = [row for row in ROWS if not row.paths]
PARAMETERS = [(path, name, row.state) for row in ROWS for path in row.paths for name in row.names]


def parameters(*states: str) -> list[tuple[str, str]]:
    return [(path, name) for path, name, state in PARAMETERS if state in states]


def body(path: str, name: str, value: Any) -> dict[str, Any]:
    """`name`: with a dot, a field of a field."""
    outer, _, inner = name.partition(".")
    return LEAST[path] | {outer: {inner: value} if inner else value}


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubSystem]:
    with stub_system(make_text_model(tmp_path_factory.mktemp("model") / "m"), ["prefill", "decode"]) as system:
        yield system


@pytest.fixture(autouse=True)
def nothing_is_left(stubs: StubSystem) -> Iterator[None]:
    yield from stubs.one_test()


@cache
def functions_of(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) > 100
    for row in ROWS:
        assert row.state in STATES, row
        for test in row.tests:
            file, _, name = test.partition("::")
            assert name in functions_of(ROOT / "tests" / file), (row.names, test)


def test_the_tables_hold_the_parameters_that_the_gateway_knows(stubs: StubSystem) -> None:
    document = httpx.get(stubs.url + "/openapi.json").json()
    schemas = document["components"]["schemas"]
    operations = {path: one["post"] for path, one in document["paths"].items() if "post" in one}
    assert set(operations) == set(LEAST)
    for path, operation in operations.items():
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        known = set(schemas[reference.rpartition("/")[2]]["properties"])
        listed = [name for at, name, _ in PARAMETERS if at == path and "." not in name]
        assert set(listed) == known, path
        assert len(listed) == len(known), f"a parameter of {path} is listed twice"


HEADERS = {"user_profile_id", "workspace_id"}
"""Anthropic's client takes these as parameters and sends them as headers."""
CLIENTS: list[tuple[str, Any]] = [
    ("/v1/chat/completions", chat.completion_create_params.CompletionCreateParamsNonStreaming),
    ("/v1/completions", openai.completion_create_params.CompletionCreateParamsNonStreaming),
    ("/v1/responses", responses.response_create_params.ResponseCreateParamsNonStreaming),
    ("/v1/messages", claude.message_create_params.MessageCreateParamsNonStreaming),
    ("/v1/messages/count_tokens", claude.message_count_tokens_params.MessageCountTokensParams),
]


@pytest.mark.parametrize(("path", "params"), CLIENTS, ids=[path for path, _ in CLIENTS])
def test_the_tables_hold_all_that_the_installed_clients_can_send(path: str, params: Any) -> None:
    sent = set(params.__annotations__) - HEADERS
    assert len(sent) > 5
    assert sent <= {name for at, name, _ in PARAMETERS if at == path}


@pytest.mark.parametrize(("path", "name"), parameters("refused"))
def test_what_is_refused_is_refused_by_name(stubs: StubSystem, path: str, name: str) -> None:
    refused = stubs.post(path, body(path, name, SENT.get(name, {"any": "thing"})))
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    # Anthropic's shape has no place for it but the message.
    assert error.get("param", name) == name
    assert name in error["message"]
    assert not any(worker.calls for worker in stubs.workers)


@pytest.mark.parametrize(("path", "name"), parameters("ignored"))
def test_what_is_ignored_changes_nothing(stubs: StubSystem, path: str, name: str) -> None:
    stubs.says("one")
    value = True if name.startswith("stream_options.") else SENT.get(name, "auto")
    for sent in (LEAST[path], body(path, name, value)):
        answer = stubs.post(path, sent)
        assert answer.status_code == 200, answer.text
    for worker in stubs.workers:
        told = [
            (call.request.work.prompt_token_ids, msgspec.structs.replace(call.request.work.sampling, seed=0))
            for call in worker.calls
        ]
        assert told[1:] == told[:1], "both requests are the same work"


@pytest.mark.parametrize(("path", "name"), parameters("supported"))
def test_what_is_supported_is_checked(stubs: StubSystem, path: str, name: str) -> None:
    """Lists in a list are no value of anything: nothing is passed over unread."""
    refused = stubs.post(path, body(path, name, [[[]]]))
    error = refused.json()["error"]
    assert refused.status_code == 400, refused.text
    assert name in (error.get("param") or error["message"])


def _as_route(endpoint: str) -> str:
    return endpoint.replace("{name}", "{name:path}")


def test_the_table_of_endpoints_holds_what_is_served(stubs: StubSystem) -> None:
    listed = {_as_route(name) for row in ENDPOINTS if row.state == "supported" for name in row.names}
    refused = {name for row in ENDPOINTS if row.state == "refused" for name in row.names}
    served = {f"{method} {path}" for method, path in routes(stubs) if method != "HEAD"}
    assert listed <= served
    assert served <= listed | refused
    paths = httpx.get(stubs.url + "/openapi.json").json()["paths"]
    assert {f"{method.upper()} {path}" for path, one in paths.items() for method in one} <= listed


@pytest.mark.parametrize("endpoint", [name for row in ENDPOINTS if row.state == "refused" for name in row.names])
def test_an_endpoint_that_is_not_served_says_so(stubs: StubSystem, endpoint: str) -> None:
    method, path = endpoint.replace("{id}", "resp_1").split(" ")
    answer = stubs.http.request(method, path, json={"model": "stub"} if method == "POST" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) in {(status, "invalid_request_error") for status in (400, 404, 405)}
    assert (error["code"] == "unsupported_endpoint") == (answer.status_code == 400)
