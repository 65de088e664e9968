"""Run one worker process until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os

from services import logs
from services.cores import default_threads
from services.lifecycle import Listener, bind, parse_address, serve
from services.worker.config import WorkerConfig

logger = logging.getLogger(__name__)


def run(config: WorkerConfig) -> int:
    """Returns the exit status."""
    logs.configure(config.role, config.log_level)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(num_threads(config)))  # before torch is imported
    # Threads that wait for the next operation spin for microseconds, not milliseconds, before they sleep.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        sock = bind(config.listen)
    except OSError as error:
        logger.error("%s", error.strerror)
        return 1
    with sock:
        return asyncio.run(_main(config, sock))


def num_threads(config: WorkerConfig) -> int:
    return config.threads or default_threads(config.cores)


async def _main(config: WorkerConfig, sock: object) -> int:
    import socket

    from services.worker.app import create_app
    from services.worker.worker import Worker

    assert isinstance(sock, socket.socket)
    worker = Worker(config)
    host, _ = parse_address(config.listen)
    port = sock.getsockname()[1]
    logger.info("%s worker %s listens on %s:%d", config.role, worker.incarnation[:8], host, port)
    starting = asyncio.create_task(worker.start())
    try:
        return await serve(
            [(Listener(create_app(worker), host, port), sock)],
            on_drain=worker.drain,
            is_idle=worker.is_idle,
            drain_s=config.drain_s,
            failure=worker.failure,
        )
    finally:
        starting.cancel()
        await worker.close()
