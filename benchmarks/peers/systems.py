"""Servers under comparison, started as a person would start them; nothing of them is left when the context ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu_time import tree_cpu_s

HERE = Path(__file__).parent
START_S = 420.0
PORT = 18400


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    """Of the OpenAI API, with /v1."""
    model: str
    pid: int

    def cpu_s(self) -> float:
        """Of every process of the system."""
        return tree_cpu_s(self.pid)


def kvbaton(model: Path, shape: str, cores: str, port: int = PORT) -> tuple[list[str], Mapping[str, str]]:
    """`shape` is pair or both; the pair gets one core a worker."""
    workers = (
        ["--prefill", "1", "--decode", "1"] if shape == "pair" else ["--prefill", "0", "--decode", "0", "--both", "1"]
    )
    command = [sys.executable, "-m", "services.cli", "serve", "--model", str(model), "--served-model-name", "peer"]
    return ["taskset", "-c", cores, *command, "--port", str(port), *workers], {"PYTHONPATH": str(HERE.parents[1])}


def vllm(venv: Path, model: Path, shape: str, cores: str, port: int = PORT) -> tuple[list[str], Mapping[str, str]]:
    return [str(HERE / "vllm-server"), shape, str(venv), str(model), str(port), cores], {}


@contextmanager
def running(command: Sequence[str], environ: Mapping[str, str], port: int = PORT) -> Iterator[Running]:
    """Raises RuntimeError if it does not answer in START_S."""
    process = subprocess.Popen(
        command, env={**os.environ, **environ}, stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
    )
    try:
        _wait(f"http://127.0.0.1:{port}/v1/completions", process)
        yield Running(f"http://127.0.0.1:{port}/v1", "peer", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until it completes a prompt: a list of models may be there before the model is."""
    body = json.dumps({"model": "peer", "prompt": [1000], "max_tokens": 1}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with status {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                if response.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"not ready within {START_S:.0f} s")
