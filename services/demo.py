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
BAR_CELLS = 14


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
            _check_handed_off(record)
            shown.print(timeline(record))
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


def _check_handed_off(record: dict[str, Any]) -> None:
    if not record["transfer"]:
        raise DemoFailed(f"no KV moved between the workers: {record['attempts']}")


def timeline(record: dict[str, Any]) -> Table:
    """The parts of one request as bars on a common scale: what came before the first token, and what after."""
    gateway, prefill, transfer, decode = (record[part] for part in ("gateway", "prefill", "transfer", "decode"))
    moved, seconds = transfer["bytes"], transfer["seconds"]
    rate = moved / seconds / 1e9 if seconds else 0.0
    rows = [
        ("gateway: tokenize", gateway["tokenize_s"], f"{record['num_prompt_tokens']} prompt tokens"),
        ("gateway: queue", gateway["queue_s"], ""),
        ("decode: reserve", gateway["reserve_s"] or 0.0, "every block of the prompt"),
        ("prefill: queue", prefill["queue_s"], ""),
        ("prefill: compute", prefill["compute_s"], f"{prefill['num_cached_tokens']} tokens were cached"),
        ("first token", record["first_token_at"], "after arrival: TTFT"),
        ("transfer", seconds, f"{moved / 1e6:.1f} MB, {rate:.2f} GB/s, {transfer['lane']}"),
        ("decode: first step", decode["first_step_s"], ""),
        (
            "decode",
            decode["decode_s"],
            f"{record['num_output_tokens']} tokens, {decode['tokens_per_s'] or 0:.1f} tokens/s",
        ),
        ("total", record["total_s"], ""),
    ]
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("", min_width=18, no_wrap=True)
    table.add_column("ms", min_width=7, no_wrap=True, justify="right")
    table.add_column("", min_width=BAR_CELLS, no_wrap=True)
    table.add_column("", overflow="fold")
    longest = max(row[1] for row in rows) or 1.0
    for name, value, detail in rows:
        table.add_row(name, f"{value * 1e3:.1f}", "━" * round(BAR_CELLS * value / longest), str(detail))
    return table


async def _record(session: aiohttp.ClientSession, layout: SystemPlan, request_id: str) -> dict[str, Any]:
    async with session.get(f"{layout.gateway.url}/debug/requests/{request_id}") as response:
        if response.status != 200:
            raise DemoFailed(f"no record of request {request_id}: {response.status}")
        record: dict[str, Any] = await response.json()
        return record


if __name__ == "__main__":
    sys.exit(main())
