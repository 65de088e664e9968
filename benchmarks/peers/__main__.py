"""Compare with other servers on the same cores; JSON into build/bench/peers.json, tables on standard error.

make bench-peers                                   ours, and the peers that are installed
make bench-peers ARGS="--install vllm llama"       install them first, each into build/peers/NAME (gigabytes, minutes)
make bench-peers ARGS="--only offline"             or served
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers import compare, served
from services.model_store import ensure_default_model

HERE = Path(__file__).parent
VENVS = Path("build/peers").absolute()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-peers", description=__doc__.splitlines()[0])
    parser.add_argument("--install", nargs="*", default=[], choices=["vllm", "llama"], help="install these first")
    parser.add_argument("--only", choices=["offline", "served"], help="half of it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="*", help="of the offline comparison (default: all that are installed)")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="of the offline comparison")
    parser.add_argument("--scenarios", nargs="*", default=list(served.SCENARIOS), choices=list(served.SCENARIOS))
    parser.add_argument("--systems", nargs="*", help="of the served comparison (default: all that are installed)")
    parser.add_argument("--out", type=Path, default=Path("build/bench/peers.json"))
    args = parser.parse_args()
    for peer in args.install:
        subprocess.run([str(HERE / "install"), peer, str(VENVS / peer)], check=True)
    model = ensure_default_model()
    result: dict[str, Any] = {"benchmark": "peers", "machine": platform.processor() or platform.machine()}
    if args.only != "served":
        gguf = next((VENVS / "llama").glob("*Q8_0.gguf"), None)
        entries = [e for e in compare.contenders(model, gguf, VENVS) if not args.engines or e.name in args.engines]
        result["offline"] = compare.compare(entries, args.core, args.repeats)
        names = [row["name"] for row in result["offline"]]
        base = "vllm bfloat16" if "vllm bfloat16" in names else names[0]
        print("\n".join(compare.table(result["offline"], base)), file=sys.stderr)
    if args.only != "offline":
        systems = served.starts(model, VENVS)
        chosen = {name: start for name, start in systems.items() if not args.systems or name in args.systems}
        result["served"] = served.compare(chosen, args.scenarios, args.repeats)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
