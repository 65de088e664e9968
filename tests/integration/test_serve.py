"""`kvbaton serve` as a person runs it: ready lines, an answer, a crash reported, a clean stop, a wrong setting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.cluster import ROOT, free_port
from tests.support.tiny_model import make_tiny_model

START_S, STOP_S = 120.0, 30.0


class Serve:
    def __init__(self, model: Path, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        port = self.url.rpartition(":")[2]
        self.lines: list[str] = []
        self._seen = threading.Condition()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "serve", "--model", str(model), "--port", port, *flags],
            cwd=ROOT,
            env=os.environ | {"COLUMNS": "300"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self._seen:
                self.lines.append(line.rstrip())
                self._seen.notify_all()
        with self._seen:
            self.lines.append("(end)")
            self._seen.notify_all()

    def wait_for(self, pattern: str, timeout_s: float = START_S) -> str:
        def found() -> str | None:
            return next((line for line in self.lines if re.search(pattern, line)), None)

        with self._seen:
            assert self._seen.wait_for(lambda: found() or "(end)" in self.lines, timeout_s), self.lines
        line = found()
        assert line is not None, self.lines
        return line

    def children(self) -> dict[str, psutil.Process]:
        """By subcommand."""
        return {
            next(role for role in ("gateway", "prefill", "decode") if role in child.cmdline()): child
            for child in psutil.Process(self.popen.pid).children()
        }

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            return self.popen.wait(STOP_S)
        finally:
            self.popen.kill()
            self._reader.join(STOP_S)
            assert self.popen.stderr is not None
            self.popen.stderr.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


@pytest.fixture
def served(model: Path) -> Iterator[Serve]:
    serve = Serve(model, "--num-blocks", "64", "--drain-s", "5")
    yield serve
    serve.stop(signal.SIGKILL)


def ask(serve: Serve) -> httpx.Response:
    body = {"model": "tiny", "prompt": "The baton passes from the first runner", "max_tokens": 4}
    return httpx.post(serve.url + "/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_each_process_says_when_it_is_ready_and_nothing_is_left_after_a_stop(served: Serve, number: int) -> None:
    for name in ("prefill-0", "decode-0", "gateway"):
        served.wait_for(f"ready {name}")
    served.wait_for("serving http")
    assert ask(served).status_code == 200
    children = served.children()
    assert set(children) == {"gateway", "prefill", "decode"}
    assert served.stop(number) == 0
    assert psutil.wait_procs(list(children.values()), timeout=1)[1] == []


def test_a_crash_is_reported_and_the_worker_started_again(served: Serve) -> None:
    served.wait_for("serving http")
    served.children()["prefill"].send_signal(signal.SIGKILL)
    served.wait_for("crash prefill-0 killed by signal 9")
    assert ask(served).status_code == 200, "decode computes the prompt itself meanwhile"
    with served._seen:
        again = served._seen.wait_for(lambda: sum("ready prefill-0" in line for line in served.lines) == 2, START_S)
    assert again, served.lines
    assert served.stop() == 0


def test_a_killed_supervisor_leaves_nothing_running(served: Serve) -> None:
    served.wait_for("serving http")
    children = list(served.children().values())
    served.popen.kill()
    _, alive = psutil.wait_procs(children, timeout=STOP_S)
    assert alive == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--dtype", "int3"], "--dtype 'int3'"),
        (["--decode", "0"], "--decode"),
        (["--num-block", "4"], "--num-block"),
    ],
)
def test_a_wrong_setting_ends_the_start_and_is_named(model: Path, flags: list[str], said: str) -> None:
    serve = Serve(model, *flags)
    try:
        serve.wait_for(re.escape(said))
        assert serve.popen.wait(START_S) in (1, 2)
    finally:
        serve.stop()
