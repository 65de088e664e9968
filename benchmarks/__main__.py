"""Run every benchmark, one after another, each in a process of its own; JSON into build/bench, a summary on screen."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TIMEOUT_S = 1800


def main() -> int:
    names = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("names", nargs="*", default=names, help=f"which ones: {', '.join(names)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for the JSON")
    args = parser.parse_args()
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    return max((_run(name, args.out) for name in args.names), default=0)


def _run(name: str, out: Path) -> int:
    command = [sys.executable, "-m", f"benchmarks.bench_{name}"]
    print(f"== {name}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=TIMEOUT_S)
    (out / f"{name}.json").write_bytes(done.stdout)
    sys.stdout.write(done.stdout.decode())
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
