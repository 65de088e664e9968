"""A service's life: listen, serve, drain with a deadline, stop.

    serving --SIGTERM--> leaving (leave_s): not ready, new work is taken, every answer closes its connection
            --> draining (drain_s): no new work, until idle --> stopped

While a process is leaving, whoever routes to it takes notice, and clients that keep connections come back over new
ones, which lead elsewhere. The listener stays open to the end: nobody is refused a connection. A second signal ends
both waits.
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
        self.closes_connections = False
        """After the answer to each request that comes from now on."""
        self._app = app
        super().__init__(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
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

    def end_connections(self) -> None:
        """Close those on which nothing runs, and the others after their answer."""
        self.closes_connections = True
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.closes_connections or scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def closing(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await self._app(scope, receive, closing)

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
    on_leave: Callable[[], None] = lambda: None,
    leave_s: float = 0.0,
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
        on_leave()
        for listener, _ in listeners:
            listener.closes_connections = True
        deadline = loop.time() + leave_s
        while loop.time() < deadline and signals < 2:  # noqa: ASYNC110 - two things end it
            await asyncio.sleep(POLL_S)
        on_drain()
        for listener, _ in listeners:
            listener.end_connections()
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
