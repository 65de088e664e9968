"""A service's life: listen, serve, drain with a deadline, stop.

The first SIGTERM or SIGINT calls `on_drain` (not ready at once, no new work) and waits until `is_idle` or until
the drain time is over; the listener stays open meanwhile, so that nobody is refused a connection before the
routing has noticed. A second signal ends the wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

logger = logging.getLogger(__name__)
POLL_S = 0.05
KEEP_ALIVE_S = 75
"""Longer than any client of ours keeps an idle connection, so that the client, which can retry, closes first."""
CLOSE_S = 3
"""Bound on closing what is still open once the drain is over."""


class Listener(uvicorn.Server):
    """One HTTP listener inside a loop that others share: leaves signals to `serve`."""

    def __init__(self, app: Any, host: str, port: int, **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
                **options,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def parse_address(text: str) -> tuple[str, int]:
    """Split host:port ([v6]:port). Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {text!r}")
    return host.strip("[]") or "0.0.0.0", int(port)


def bind(address: str, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket; OSError names the address. `reuse_port`: other processes may listen on it too, and the
    kernel shares connections out."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


async def serve(
    listeners: list[tuple[Listener, socket.socket]],
    *,
    on_drain: Callable[[], None],
    is_idle: Callable[[], bool],
    drain_s: float,
    failure: asyncio.Future[str] | None = None,
) -> int:
    """Run until told to stop. Returns the exit status: 0 after a stop, 1 after `failure` was set."""
    loop = asyncio.get_running_loop()
    signals = 0
    told = asyncio.Event()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    servers = [asyncio.create_task(listener.serve(sockets=[sock])) for listener, sock in listeners]
    waiting = {asyncio.ensure_future(told.wait()), *servers} | ({failure} if failure else set())
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if failure is not None and failure.done():
            logger.error("stopping: %s", failure.result())
            return 1
        on_drain()
        deadline = loop.time() + drain_s
        while not is_idle() and loop.time() < deadline and signals < 2:  # noqa: ASYNC110 - many places change it
            await asyncio.sleep(POLL_S)
        return 0
    finally:
        for listener, _ in listeners:
            listener.should_exit = True
            listener.force_exit = signals > 1
        await asyncio.wait(servers, timeout=CLOSE_S + 1)
        for task in waiting - {failure}:
            task.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
