"""CPU that one gateway process spends on a streamed token and on a request, and the time to first token it adds.
JSON to stdout.

    clients (stream_client) -> gateway, as a person would start it -> prefill and decode stubs (stub_workers)

Each in a process of its own. CPU is the gateway's alone, from its process clock, less what it takes when idle; a
noisy machine changes it less than wall time. Per token: streams in full flow, nothing begins or ends. Per request:
answers of two tokens through the pair, as many at a time as there were streams. Added time to first token: from the
client's request to its first token, less what the stubs held back themselves, of requests that come one by one
while the streams flow; the client's own work and the loopback are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_time import process_cpu_s
from services.lifecycle import bind
from tests.support.stub_system import SECRET
from tests.support.text_model import make_text_model

READY_S = 60.0
SETTLE_S = 1.0
"""After streams have begun, and after they have been closed."""
PROBE_LANES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,32,256", help="numbers of concurrent streams")
    parser.add_argument("--tick-ms", type=float, default=40.0, help="between two tokens of a stream")
    parser.add_argument("--flow-s", type=float, default=5.0, help="seconds of full flow in each measurement")
    parser.add_argument("--probes", type=int, default=150, help="requests whose time to first token is taken")
    parser.add_argument("--requests", type=int, default=150, help="short requests of a measurement, at least")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkout", type=Path, default=Path.cwd(), help="start the gateway from this checkout")
    args = parser.parse_args()
    counts = [int(count) for count in args.streams.split(",")]
    with ExitStack() as stack:
        stand = stack.enter_context(_stand(args))
        idle_cores = stand.idle_cores()
        runs = [{count: stand.measure(count, args, idle_cores) for count in counts} for _ in range(args.repeats)]
    result = {
        "benchmark": "gateway",
        "tick_ms": args.tick_ms,
        "repeats": args.repeats,
        "idle_cores": round(idle_cores, 4),
        "load_average": round(os.getloadavg()[0], 1),
        "streams": {count: _summary([run[count] for run in runs]) for count in counts},
    }
    print(json.dumps(result, indent=2))


def python_loop_ns() -> float:
    """CPU time of one turn of an empty Python loop here and now, to compare runs by: a neighbour on the same core
    makes every figure above grow alike."""
    began = time.process_time()
    for _ in range(3_000_000):
        pass
    return round((time.process_time() - began) / 3_000_000 * 1e9, 1)


class Peer:
    """A process that answers each line with one line, both JSON."""

    def __init__(self, module: str, *args: str) -> None:
        command = [sys.executable, "-m", f"benchmarks.{module}", *args]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *words: Any) -> Any:
        assert self._popen.stdin is not None, "a pipe"
        self._popen.stdin.write(json.dumps(words) + "\n")
        self._popen.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        assert self._popen.stdout is not None, "a pipe"
        line = self._popen.stdout.readline()
        assert line, "a process of the benchmark has ended"
        return json.loads(line)

    def stop(self) -> None:
        assert self._popen.stdin is not None, "a pipe"
        self._popen.stdin.close()
        self._popen.wait(20)


@dataclass(frozen=True)
class Stand:
    gateway_pid: int
    workers: Peer
    clients: Peer

    def idle_cores(self) -> float:
        self.clients.ask("requests", 50, 4, 0.0)
        time.sleep(SETTLE_S)
        used_s, wall_s = self._cpu_and_wall(lambda: time.sleep(5))
        return used_s / wall_s

    def measure(self, num_streams: int, args: argparse.Namespace, idle_cores: float) -> dict[str, Any]:
        tick_s = args.tick_ms / 1000
        self.clients.ask("open", num_streams)
        time.sleep(SETTLE_S)
        before = self.clients.ask("tokens")
        used_s, wall_s = self._cpu_and_wall(lambda: time.sleep(args.flow_s))
        num_tokens = self.clients.ask("tokens") - before
        loop_ns = python_loop_ns()
        added_s = self._added_ttft_s(args.probes, tick_s)
        self.clients.ask("close")
        time.sleep(SETTLE_S)
        num_requests = max(args.requests, 2 * num_streams)
        request_s, request_wall_s = self._cpu_and_wall(
            lambda: self.clients.ask("requests", num_requests, num_streams, 0.0)
        )
        return {
            "tokens_per_s": num_tokens / wall_s,
            "python_loop_ns": loop_ns,
            "cpu_us_per_token": (used_s - idle_cores * wall_s) / num_tokens * 1e6,
            "cpu_us_per_request": (request_s - idle_cores * request_wall_s) / num_requests * 1e6,
            "added_ttft_ms": [seconds * 1000 for seconds in added_s],
        }

    def _added_ttft_s(self, num_probes: int, tick_s: float) -> list[float]:
        self.workers.ask()
        ttft_s = self.clients.ask("requests", num_probes, PROBE_LANES, tick_s)
        own_s = self.workers.ask()
        return [seconds - own_s[f"{request_id}-1"] for request_id, seconds in ttft_s.items()]

    def _cpu_and_wall(self, work: Callable[[], object]) -> tuple[float, float]:
        cpu_s, wall_s = process_cpu_s(self.gateway_pid), time.monotonic()
        work()
        return process_cpu_s(self.gateway_pid) - cpu_s, time.monotonic() - wall_s


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    added = [_p50_p99(run["added_ttft_ms"]) for run in runs]
    return {
        **{name: _spread([run[name] for run in runs]) for name in runs[0] if name != "added_ttft_ms"},
        "added_ttft_p50_ms": _spread([p50 for p50, _ in added]),
        "added_ttft_p99_ms": _spread([p99 for _, p99 in added]),
    }


def _p50_p99(values: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def _spread(values: list[float]) -> dict[str, float]:
    median, low, high = statistics.median(values), min(values), max(values)
    return {"median": round(median, 2), "min": round(low, 2), "max": round(high, 2)}


@contextmanager
def _stand(args: argparse.Namespace) -> Iterator[Stand]:
    with ExitStack() as stack:
        model = make_text_model(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "m", context_tokens=1 << 20)
        workers = Peer("stub_workers", "--tick-s", str(args.tick_ms / 1000))
        stack.callback(workers.stop)
        gateway, url = _start_gateway(model, workers.hear(), args.checkout)
        stack.callback(gateway.wait, 20)
        stack.callback(gateway.terminate)
        _wait_ready(url)
        clients = Peer("stream_client", "--url", f"{url}/v1/chat/completions")
        stack.callback(clients.stop)
        yield Stand(gateway.pid, workers, clients)


def _start_gateway(model: Path, workers: list[str], checkout: Path) -> tuple[subprocess.Popen[bytes], str]:
    public, admin = (_free_address() for _ in range(2))
    command = [sys.executable, "-m", "services.cli", "gateway", "--model", str(model), "--served-model-name", "stub"]
    command += ["--workers", ",".join(workers), "--local-prefill-max-tokens", "0", "--log-level", "warning"]
    command += ["--listen", public, "--admin-listen", admin]
    environment = os.environ | {"KVBATON__SECRET": SECRET}
    return subprocess.Popen(command, env=environment, cwd=checkout), f"http://{public}"


def _free_address() -> str:
    with bind("127.0.0.1:0") as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=1):
                return
        except OSError:
            assert time.monotonic() < deadline, f"the gateway was not ready within {READY_S:.0f} s"
            time.sleep(0.1)


if __name__ == "__main__":
    main()
