"""schemathesis on our own OpenAPI document: no answer is a fault of ours, and what the document refuses is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.stub_system import stub_system
from tests.support.text_model import make_text_model

CHECKS = ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "m")


def test_our_own_document_holds(model: Path, tmp_path: Path) -> None:
    with stub_system(model, ["prefill", "decode"]) as stubs:
        stubs.says("fine")
        document = httpx.get(stubs.url + "/openapi.json").json()
        assert len(document["paths"]) >= 10
        command = [sys.executable, "-m", "schemathesis.cli", "run", stubs.url + "/openapi.json"]
        options = [
            *("--checks", ",".join([*CHECKS, "negative_data_rejection"])),
            *("--max-examples", "20", "--seed", "7", "--phases", "fuzzing", "--generation-database", "none"),
            *("--workers", "1", "--no-color", "--request-timeout", "10"),
        ]
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_field_of_a_request_is_in_the_document(model: Path) -> None:
    with stub_system(model, ["decode"]) as stubs:
        schemas = httpx.get(stubs.url + "/openapi.json").json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        assert schemas[name]["additionalProperties"] is False
        assert {"model", "stream", "temperature"} <= set(schemas[name]["properties"])
    assert schemas["ChatRequest"]["properties"]["user"] == {"description": "accepted, without effect"}
