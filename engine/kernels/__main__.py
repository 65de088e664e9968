"""Build the native kernels now rather than at the first start of a worker: `python -m engine.kernels`."""

from __future__ import annotations

import logging
import sys

from engine.kernels import build

if __name__ == "__main__":
    logging.basicConfig(format="kernels: %(message)s")
    loaded = build.load()
    if not isinstance(loaded, str):
        print(f"kernels: {loaded.__file__}")
    sys.exit(isinstance(loaded, str))
