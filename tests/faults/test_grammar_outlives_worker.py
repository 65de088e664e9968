"""A stream that follows a grammar goes on in the middle of it when its decode worker is killed."""

from __future__ import annotations

import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.cluster import Cluster, running
from tests.support.tiny_model import make_tiny_model

PATTERN = "[a-z]{60}-[0-9]{60}"
FLAGS = ["--num-blocks", "200", "--dtype", "float32", "--test-faults", "pause:step:*:0.02"]
"""Slow enough to be still running when the worker is killed."""
NUM_STREAMS = 4


def stream(cluster: Cluster, seed: int, begun: threading.Semaphore) -> str:
    """The text of a stream that must end by itself; `begun` is told once it is in the letters."""
    body: dict[str, Any] = {"model": "tiny", "prompt": list(range(20, 80)), "guided_regex": PATTERN, "stream": True}
    text = ""
    reasons = []
    sampling = {"seed": seed, "temperature": 1.0, "max_tokens": 200}
    with httpx.stream("POST", cluster.gateway.url + "/v1/completions", json=body | sampling, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                (choice,) = event["choices"]
                before, text = text, text + choice["text"]
                reasons.append(choice["finish_reason"])
                if len(before) < 10 <= len(text):
                    begun.release()
    assert reasons[-1] == "stop"
    return text


def test_a_grammar_goes_on_on_another_worker(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", hidden=128, layers=4)
    flags = {"prefill": FLAGS, "decode": FLAGS}
    roles = ["prefill", "decode", "decode"]
    gateway_flags = ["--local-prefill-max-tokens", "0"]
    with running(model, roles, worker_flags=flags, gateway_flags=gateway_flags) as cluster:
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            begun = threading.Semaphore(0)
            undisturbed = [stream(cluster, seed, begun) for seed in range(NUM_STREAMS)]
            begun = threading.Semaphore(0)
            futures = [pool.submit(stream, cluster, seed, begun) for seed in range(NUM_STREAMS)]
            for _ in range(NUM_STREAMS):
                assert begun.acquire(timeout=60)
            victim = max(cluster.of_role("decode"), key=lambda worker: worker.ledger()["open_streams"])
            assert victim.ledger()["open_streams"] > 0, "the streams had ended already"
            victim.send(signal.SIGKILL)
            texts = [future.result(timeout=120) for future in futures]
        assert all(re.fullmatch(PATTERN, text) for text in texts)
        assert texts == undisturbed
        cluster.assert_idle()
