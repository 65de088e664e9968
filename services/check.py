"""`kvbaton check`: one chat request to a running system, which must have moved KV from prefill to decode.

What `helm test` runs. A system can answer every request and never move a byte, since decode computes a prompt itself
when it must: only the request's own timeline shows which happened. Blocking; exit status 0 or 1.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

RETRY_S = 0.5
CALL_S = 120.0
QUESTION = "In one sentence: why is the sky blue? (Question number {nonce}, asked by the check of an installation.)"


class CheckConfig(BaseModel):
    """Each field is a flag and an environment variable: see services.settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field("http://127.0.0.1:8000", description="base URL of the gateway's API")
    admin_url: str = Field("http://127.0.0.1:8001", description="base URL of the gateway's admin API")
    max_tokens: int = Field(24, ge=2, description="output tokens to ask for")
    within_s: float = Field(60.0, gt=0, description="seconds within which the system must be able to answer")


class CheckFailed(Exception):
    """The text says what does not work."""


def run(config: CheckConfig) -> int:
    """Prints what was found. Returns the exit status."""
    try:
        deadline = time.monotonic() + config.within_s
        model = _until(deadline, lambda: _call(f"{config.url}/v1/models"))[0]["data"][0]["id"]
        answer, request_id = _until(
            deadline, lambda: _call(f"{config.url}/v1/chat/completions", _question(config, model))
        )
        print(f"model: {model}")
        print(f"answer: {answer['choices'][0]['message']['content']!r}")
        # Another gateway may get this call: each has the timelines of its own requests only.
        record, _ = _until(deadline, lambda: _call(f"{config.admin_url}/debug/requests/{request_id}"))
        transfer = moved(record)
    except CheckFailed as error:
        print(f"FAILED: {error}")
        return 1
    print(f"KV moved: {transfer['bytes']} bytes in {transfer['seconds'] * 1e3:.1f} ms over {transfer['lane']}")
    return 0


def moved(record: dict[str, Any]) -> dict[str, Any]:
    """The transfer of a request's timeline. Raises CheckFailed when no KV was moved for it, with the reason given."""
    transfer: dict[str, Any] = record.get("transfer") or {}
    if not transfer.get("bytes"):
        why = (record.get("prefill") or {}).get("why_local") or "its timeline shows no transfer"
        raise CheckFailed(f"the request was answered, but no KV was moved for it: {why}")
    if not transfer.get("lane"):
        raise CheckFailed(f"{transfer['bytes']} bytes were moved, and nothing says over which lane")
    return transfer


def _question(config: CheckConfig, model: str) -> dict[str, Any]:
    # Random at its start: a prompt that decode has in its cache is not moved again.
    content = f"{secrets.token_hex(8)} {QUESTION.format(nonce=secrets.randbelow(10**9))}"
    return {"model": model, "max_tokens": config.max_tokens, "messages": [{"role": "user", "content": content}]}


def _until(deadline: float, call: Any) -> Any:
    """The first answer before the deadline. Raises CheckFailed with the last problem."""
    while True:
        try:
            return call()
        except (urllib.error.URLError, OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise CheckFailed(_shown(error)) from error
        time.sleep(RETRY_S)


def _call(url: str, body: dict[str, Any] | None = None) -> tuple[Any, str]:
    """The JSON of an answer and its request id."""
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"content-type": "application/json", "connection": "close"})
    with urllib.request.urlopen(request, timeout=CALL_S) as response:
        return json.load(response), response.headers.get("x-request-id") or ""


def _shown(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.url} answered {error.code}: {error.read(500).decode(errors='replace')}"
    return f"{type(error).__name__}: {error}"
