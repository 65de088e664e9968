"""Clients that keep asking while a test does its worst, and compare every answer with the undisturbed one."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import httpx

from tests.support.cluster import Cluster

DEADLINE_S = 90.0
NUM_OUTPUT = 120


def body(number: int, num_output: int = NUM_OUTPUT) -> dict[str, Any]:
    """Prompts of different lengths, some of them sharing a start; sampled with a seed, with penalties."""
    shared = [10 + (k * 7) % 300 for k in range(40 * (number % 2))]
    prompt = shared + [10 + (number * 37 + k * 11) % 300 for k in range(60 + 13 * (number % 5))]
    sampling = {"max_tokens": num_output, "temperature": 0.8, "seed": number, "presence_penalty": 0.5}
    return {"model": "tiny", "prompt": prompt, "stream": True, "ignore_eos": True} | sampling


@dataclass
class Answer:
    text: str = ""
    error: str | None = None
    """An OpenAI error, as a status or as the last event of the stream."""
    reason: str | None = None
    hung_up: bool = False


def ask(
    cluster: Cluster,
    request: dict[str, Any],
    leave_after: int | None = None,
    on_event: Callable[[], None] = lambda: None,
) -> Answer:
    """One streamed answer. `leave_after`: close the connection after so many events. AssertionError when the stream
    ends without a finish reason or an error."""
    answer = Answer()
    with httpx.stream("POST", cluster.gateway.url + "/v1/completions", json=request, timeout=DEADLINE_S) as response:
        if response.status_code != 200:
            answer.error = f"{response.status_code}: {response.read().decode()}"
            assert set(json.loads(response.read())["error"]) == {"message", "type", "param", "code"}
            return answer
        num_events = 0
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = event["error"]["message"]
                break
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.reason = choice["finish_reason"] or answer.reason
            num_events += 1
            on_event()
            if leave_after is not None and num_events >= leave_after:
                answer.hung_up = True
                return answer
    assert answer.reason or answer.error, "a stream ended without a finish reason or an error"
    return answer


class Background:
    """Threads that run while a test does its worst. Use as a context manager: they end with it."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a request hung"


class Load(Background):
    """The clients; `assert_right` once they have stopped."""

    def __init__(
        self, cluster: Cluster, num_clients: int, expected: dict[int, str], num_output: int = NUM_OUTPUT
    ) -> None:
        super().__init__()
        self._num_output = num_output
        self._cluster = cluster
        self._expected = expected
        self._changed = threading.Condition()
        self.num_answers = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(i, num_clients)) for i in range(num_clients)]

    def wait_for(self, num_more: int, timeout_s: float = DEADLINE_S) -> None:
        """Until so many more answers have come than there are now."""
        with self._changed:
            wanted = self.num_answers + num_more
            assert self._changed.wait_for(lambda: self.num_answers >= wanted, timeout_s), "the system stands still"

    def assert_right(self) -> None:
        assert not self.wrong, self.wrong[0]
        assert not self.errors, Counter(self.errors).most_common(3)

    def _run(self, first: int, step: int) -> None:
        numbers = sorted(self._expected)
        turn = first
        while not self._stop.is_set():
            number = numbers[turn % len(numbers)]
            turn += step
            try:
                answer = ask(self._cluster, body(number, self._num_output))
            except (httpx.HTTPError, AssertionError) as error:
                answer = Answer(error=repr(error))
            with self._changed:
                self.num_answers += 1
                if answer.error is not None:
                    self.errors.append(answer.error)
                elif answer.text != self._expected[number]:
                    self.wrong.append(f"request {number}: {answer.text!r} is not {self._expected[number]!r}")
                self._changed.notify_all()


def undisturbed(cluster: Cluster, numbers: range, num_output: int = NUM_OUTPUT) -> dict[int, str]:
    """The right answers: tests/e2e/test_pair_oracle.py shows that they are those of an independent implementation."""
    expected = {}
    for number in numbers:
        answer = ask(cluster, body(number, num_output))
        assert answer.error is None, answer.error
        expected[number] = answer.text
    return expected


class HealthWatch(Background):
    """Asks /health of processes all the time."""

    PERIOD_S = 0.05
    SOON_S = 0.1
    BLOCKED_S = 1.0
    """Longer than any pause that a scheduler of a crowded machine makes, shorter than the faults that are injected."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__()
        self.seconds: dict[str, list[float]] = {url: [] for url in urls}
        self._threads = [threading.Thread(target=self._run, args=(url,)) for url in urls]

    def _run(self, url: str) -> None:
        with httpx.Client(timeout=20) as client:
            while not self._stop.wait(self.PERIOD_S):
                began = time.monotonic()
                try:
                    client.get(url + "/health").raise_for_status()
                    self.seconds[url].append(time.monotonic() - began)
                except httpx.HTTPError:
                    self.seconds[url].append(float("inf"))

    def assert_prompt(self) -> None:
        """Nine of ten answers within 100 ms, and none so late that the event loop must have been blocked."""
        for url, seconds in self.seconds.items():
            assert seconds, url
            late = sum(value > self.SOON_S for value in seconds)
            assert max(seconds) < self.BLOCKED_S, f"{url}: an answer took {max(seconds):.2f} s"
            assert late <= len(seconds) / 10, f"{url}: {late} of {len(seconds)} answers took over 100 ms"
