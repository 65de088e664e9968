"""One line a log record, to standard error: time, level, process, logger, message."""

from __future__ import annotations

import logging
import sys


def configure(process: str, level: str) -> None:
    """Route every logger of the process, uvicorn's included, to standard error."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [stream]
    root.setLevel(level.upper())
    for name in ("uvicorn.access", "asyncio"):
        logging.getLogger(name).setLevel(logging.WARNING)
