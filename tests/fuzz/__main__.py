"""Coverage-guided fuzzing of every decoder, for a bounded time.

    python -m tests.fuzz control 20        one target, seconds
    python -m tests.fuzz all 20            each of them for so long, in a process of its own

Needs atheris, which has wheels for Linux on x86-64; elsewhere it says so and ends with status 0.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from services import protocol
from tests.fuzz.targets import TARGETS
from transport import messages


def seeds() -> list[bytes]:
    """One valid message of most kinds: what the mutations begin with."""
    work = protocol.Work(
        request_id="r", prompt_token_ids=[1, 2], sampling=protocol.Sampling(max_tokens=3, seed=1), deadline_s=1.0
    )
    hello = messages.Hello("incarnation", {"model": "m", "head_dim": 16})
    controls = [
        hello,
        messages.HelloReply(hello, ""),
        messages.Open(bytes(16), 1, bytes(32), 0, 9),
        messages.Segment(bytes(16), 1, 0, 9, 900, 7),
        messages.Commit(bytes(16), 1, 7, b"meta"),
        messages.Abort(bytes(16), 1, "why"),
    ]
    frames = [protocol.Busy(), protocol.Leaving(), protocol.Tokens(index=0, token_ids=[1, 2])]
    return [
        *(messages._encoder.encode(message) for message in controls),
        protocol.encode(protocol.GenerateRequest(work=work)),
        protocol.encode(protocol.PrefillRequest(work=work)),
        b"\x03" + b"".join(protocol.encode_frame(frame) for frame in frames),
    ]


def fuzz(name: str, seconds: int) -> None:
    import atheris

    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(seeds()):
            Path(corpus, str(number)).write_bytes(seed)
        limits = [f"-max_total_time={seconds}", "-timeout=5", "-rss_limit_mb=1024", "-max_len=65536"]
        atheris.instrument_all()
        atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={tempfile.gettempdir()}/fuzz-", corpus], target)
        atheris.Fuzz()


def main(which: str, seconds: int) -> int:
    if importlib.util.find_spec("atheris") is None:
        print("fuzz: skipped, atheris is not installed and has no wheel for this machine")
        return 0
    if which != "all":
        fuzz(which, seconds)
        return 0
    for name in TARGETS:
        status = subprocess.run([sys.executable, "-m", "tests.fuzz", name, str(seconds)], check=False).returncode
        if status:
            print(f"fuzz: {name} found a fault, status {status}")
            return 1
    print("fuzz: no fault found")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "all", int(sys.argv[2]) if len(sys.argv) > 2 else 20))
