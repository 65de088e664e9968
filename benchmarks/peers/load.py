"""Streaming load on an OpenAI API, and what its clients see. Prompts are random token ids; answers have a fixed length.

TTFT    request sent to first token      ITL   gap between two chunks with text
TPOT    (end - first token) / (tokens - 1)
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp


@dataclass(slots=True)
class Answer:
    sent_s: float
    """On time.monotonic, as all times here."""
    token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    """As the server counts them; some tokens make no text of their own."""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / max(1, self.num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def generate(self, prompt: Sequence[int], num_output: int) -> Answer:
        """Raises RuntimeError where the stream does not end as it should."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer(time.monotonic())
        async with self._session.post(f"{self._url}/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                if event.get("choices") and event["choices"][0].get("text"):
                    answer.token_s.append(time.monotonic())
                if event.get("usage"):
                    answer.num_tokens = event["usage"]["completion_tokens"]
        if answer.num_tokens != num_output or not answer.token_s:
            raise RuntimeError(f"{answer.num_tokens} tokens instead of {num_output}")
        return answer


@asynccontextmanager
async def client(url: str, model: str) -> AsyncIterator[Client]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        yield Client(session, url, model)


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(num_tokens)]


async def open_loop(on: Client, seed: int, rate: float, count: int, num_prompt: int, num_output: int) -> list[Answer]:
    """`count` requests at Poisson arrivals of `rate` a second, whatever the answers do."""
    rng = random.Random(seed)
    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(on.generate(prompt(rng, num_prompt), num_output)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    on: Client, seed: int, streams: int, rounds: int, num_prompt: int, num_output: int
) -> list[Answer]:
    async def stream(number: int) -> list[Answer]:
        rng = random.Random(seed * 1000 + number)
        return [await on.generate(prompt(rng, num_prompt), num_output) for _ in range(rounds)]

    results = await asyncio.gather(*(stream(i) for i in range(streams)))
    return [answer for answers in results for answer in answers]


async def interference(
    on: Client, seed: int, streams: int, num_output: int, arrivals: int, num_prompt: int
) -> tuple[list[Answer], list[Answer]]:
    """Short prompts that stream, and once all of them do, long prompts one after another. Returns both kinds."""
    rng = random.Random(seed)
    running = [asyncio.create_task(on.generate(prompt(rng, 32), num_output)) for _ in range(streams)]
    await asyncio.sleep(1.0)
    long = [await on.generate(prompt(rng, num_prompt), 2) for _ in range(arrivals)]
    return list(await asyncio.gather(*running)), long


def summary(answers: Sequence[Answer]) -> dict[str, float]:
    """Percentiles in seconds, and output tokens a second from the first request to the last token."""
    ttft, tpot = [a.ttft_s for a in answers], [a.tpot_s for a in answers]
    gaps = [gap for a in answers for gap in a.gaps_s]
    span_s = max(a.token_s[-1] for a in answers) - min(a.sent_s for a in answers)
    return {
        "requests": len(answers),
        "output_tokens_per_s": sum(a.num_tokens for a in answers) / span_s,
        **{f"ttft_p{p}_s": percentile(ttft, p) for p in (50, 95)},
        **{f"itl_p{p}_s": percentile(gaps, p) for p in (50, 95, 99)},
        **{f"tpot_p{p}_s": percentile(tpot, p) for p in (50, 95)},
    }


def goodput(answers: Sequence[Answer], ttft_s: float, tpot_s: float) -> float:
    """Requests a second that met both limits."""
    span_s = max(a.token_s[-1] for a in answers) - min(a.sent_s for a in answers)
    return sum(1 for a in answers if a.ttft_s <= ttft_s and a.tpot_s <= tpot_s) / span_s


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    if len(ordered) < 2:
        return ordered[0] if ordered else float("nan")
    return statistics.quantiles(ordered, n=100, method="inclusive")[percent - 1]
