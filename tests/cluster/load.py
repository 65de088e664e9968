"""Constant chat traffic through a Service, each answer checked to its end."""

from __future__ import annotations

import itertools
import json
import threading
from dataclasses import dataclass, field

import httpx

TIMEOUT_S = 120.0
MAX_TOKENS = 12


@dataclass
class Load:
    """`num_clients` clients that ask one question after the other until `stop`.

    Every second client keeps its connection, the others connect anew each time, as different clients of a Service do.
    """

    url: str
    model: str
    num_clients: int = 2
    num_answered: int = 0
    failures: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        for number in range(self.num_clients):
            thread = threading.Thread(target=self._client, args=(number % 2 == 0,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """After the answers that are on their way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S + 10)

    def report(self, during: str) -> str:
        return f"during {during}: {self.num_answered} requests answered, {len(self.failures)} failed requests"

    def _client(self, keeps_connection: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=None if keeps_connection else 0)
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=limits) as client:
            while not self._stop.is_set():
                problem = self._ask(client)
                with self._lock:
                    if problem:
                        self.failures.append(problem)
                    else:
                        self.num_answered += 1

    def _ask(self, client: httpx.Client) -> str:
        """What is wrong with the answer, or nothing."""
        content = f"{next(self._numbers)} is a number. Please tell me, in one sentence, why the sky is blue."
        body = {"model": self.model, "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": MAX_TOKENS, "stream": True}
        try:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    return f"HTTP {response.status_code}: {response.read()[:300]!r}"
                return _problem([line.removeprefix("data: ") for line in response.iter_lines() if line])
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"


def _problem(events: list[str]) -> str:
    if not events or events[-1] != "[DONE]":
        return f"the stream has no end: {events[-1:]}"
    choices = [choice for event in events[:-1] for choice in json.loads(event).get("choices", [])]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return "" if text and reasons in (["stop"], ["length"]) else f"text {text!r}, finish reasons {reasons}"
