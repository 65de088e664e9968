"""`make demo`: one chat request through gateway, prefill, UCX and decode, and where its time went."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from services.serve.config import ServeConfig
from services.serve.console import ServeConsole
from services.serve.main import default_model, system
from services.serve.plan import SystemPlan
from services.serve.supervisor import StartFailed

QUESTION = (
    "You are answering a curious beginner. Explain in two or three short sentences how a lighthouse keeps ships "
    "away from rocks, and why its light turns."
)
BAR_CELLS = 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--question", default=QUESTION, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    args = parser.parse_args()
    model = default_model()
    if model is None:
        return 1
    config = ServeConfig(port=0, local_prefill_max_tokens=0, drain_s=5.0)
    return asyncio.run(_demo(config, model, args.question, args.max_tokens))


async def _demo(config: ServeConfig, model: Any, question: str, max_tokens: int) -> int:
    shown = Console()
    stop = asyncio.Event()
    try:
        async with system(config, model, ServeConsole(), stop) as (_, layout):
            shown.print(f"\n[bold]user[/bold]      {question}\n[bold]assistant[/bold] ", end="", highlight=False)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
                request_id = await _chat(session, layout, shown, question, max_tokens)
                record = await _record(session, layout, request_id)
            _show(shown, record)
            await _check_handed_off(record)
    except (StartFailed, DemoFailed) as error:
        shown.print(f"[red]demo failed:[/red] {error}")
        return 1
    shown.print("stopped cleanly: no process left")
    return 0


class DemoFailed(Exception):
    """The answer did not come, or not by the way it should."""


async def _chat(
    session: aiohttp.ClientSession, layout: SystemPlan, shown: Console, question: str, max_tokens: int
) -> str:
    """Print the answer as it streams; return the request's id."""
    body = {
        "model": layout.model_name,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    async with session.post(f"{layout.public_url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise DemoFailed(await response.text())
        async for event in _events(response):
            if "error" in event:
                raise DemoFailed(event["error"]["message"])
            for choice in event["choices"]:
                shown.print(choice["delta"].get("content") or "", end="", highlight=False, markup=False)
        shown.print("\n")
        return response.headers["x-request-id"]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


async def _record(session: aiohttp.ClientSession, layout: SystemPlan, request_id: str) -> dict[str, Any]:
    async with session.get(f"{layout.gateway.url}/debug/requests/{request_id}") as response:
        if response.status != 200:
            raise DemoFailed(f"no record of request {request_id}: {response.status}")
        record: dict[str, Any] = await response.json()
        return record


if __name__ == "__main__":
    sys.exit(main())
