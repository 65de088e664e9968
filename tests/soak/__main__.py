"""Random fault schedules against a whole system of real processes; totals at the end, status 1 if any must be 0.

python -m tests.soak --schedules 1000 --seed 1       what `make soak` does
python -m tests.soak --seed 1 --only 417             one of them again
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.soak.run import soak
from tests.support.tiny_model import make_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one schedule")
    arguments = parser.parse_args()
    numbers = range(arguments.schedules) if arguments.only is None else range(arguments.only, arguments.only + 1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny", hidden=128, layers=4)
        totals = soak(model, arguments.seed, numbers, progress=lambda line: print(line, flush=True))
    print(json.dumps(totals.shown(), indent=2))
    return 0 if totals.clean else 1


if __name__ == "__main__":
    sys.exit(main())
