"""The UCX plane: the one importer of ucxx, or of UCX-Py (`ucp`), which has nearly the same asyncio API.

Progress runs on a thread of the library, with Python futures: an idle worker with a pending receive costs 1 to 2 % of
a core, where every other mode spins. Endpoint error handling stays on: it is the only mode that notices a dead peer,
and it makes UCX take tcp or RDMA lanes, never shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from transport.errors import ConnectFailed, ConnectionLost, FabricUnavailable, TransportError
from transport.plane import CONNECT_TIMEOUT_S, Channel, Connection, Plane

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
# A worker that restarts must get its port back while old connections linger.
os.environ.setdefault("UCX_TCP_CM_REUSEADDR", "y")
# UCX's own 8 KiB makes a system call of every 8 KiB: 128 KiB moves 16 MB two to four times as fast over tcp.
os.environ.setdefault("UCX_TCP_TX_SEG_SIZE", "128k")
os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "128k")
# Standard output belongs to the program.
os.environ.setdefault("UCX_LOG_FILE", "stderr")

try:
    import ucxx as ucx
except ImportError:
    try:
        import ucp as ucx
    except ImportError as error:
        raise FabricUnavailable("neither ucxx nor ucp is installed: install kvbaton[ucx], [cu12] or [cu13]") from error

logger = logging.getLogger(__name__)
SETTLE_S = 2.0
POLL_S = 0.005
NEVER_S = 1e9
"""The library's own bound on the handshake of a connection. When it runs out, or when the handshake is cancelled,
the library frees buffers that UCX still writes into, and a peer that pauses and goes on crashes this process. So it
is never reached: the bound is ours, and a handshake that exceeds it is left to end by itself."""
ABORT_NS = 10**9
"""Bound on how long the library may take to cancel what is in flight when an endpoint is aborted."""


class UcxPlane(Plane):
    """Create inside the event loop that uses it. `host` and `port` are where it listens, `advertise` is the host
    that peers are told: explicit, because the first interface of a machine is often one they cannot reach."""

    name = "ucx"

    def __init__(self, host: str = "127.0.0.1", port: int = 0, advertise: str | None = None) -> None:
        self._host = host
        self._port = port
        self._advertise = advertise or host
        self._listeners: dict[str, Any] = {}
        self._connections: set[UcxConnection] = set()
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}
        """Of accepted connections, by the address they came to."""
        self._parked: dict[str, asyncio.Task[Any]] = {}
        """Handshakes that outlived their bound, at most one an address; the next connect there waits for it."""
        self._closed = False
        _init()

    async def listen(self, on_connection: Callable[[Connection], Awaitable[None]], *, ephemeral: bool = False) -> str:
        tasks: set[asyncio.Task[Any]] = set()

        async def serve(endpoint: Any) -> None:
            await self._serve(endpoint, on_connection, tasks)

        port = 0 if ephemeral else self._port
        try:
            listener = ucx.create_listener(serve, port, **_patience())
        except Exception as error:
            raise FabricUnavailable(f"cannot listen for UCX on port {port}: {error}") from error
        host = f"[{self._advertise}]" if ":" in self._advertise else self._advertise
        address = f"{host}:{listener.port}"
        self._listeners[address] = listener
        self._tasks[address] = tasks
        return address

    async def stop_listening(self, address: str) -> None:
        """Once its connections' tasks have ended: the library warns of a listener that goes before they do."""
        listener = self._listeners.pop(address)
        tasks = self._tasks.pop(address)
        if tasks:
            await asyncio.wait(tasks, timeout=SETTLE_S)
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while getattr(listener, "active_clients", 0) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        listener.close()

    async def _serve(
        self,
        endpoint: Any,
        on_connection: Callable[[Connection], Awaitable[None]],
        tasks: set[asyncio.Task[Any]],
    ) -> None:
        connection = self._adopt(endpoint, "an accepted peer")
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await on_connection(connection)
        except TransportError:
            pass  # the peer has gone; whoever serves has been told by the same exception
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            connection.abort()
            tasks.discard(task)

    async def connect(self, address: str) -> Connection:
        handshake = self._parked.pop(address, None) or asyncio.ensure_future(_handshake(address))
        try:
            done, _ = await asyncio.wait({handshake}, timeout=CONNECT_TIMEOUT_S)
        except asyncio.CancelledError:
            self._park(address, handshake)
            raise
        if not done:
            self._park(address, handshake)
            raise ConnectFailed(f"{address} did not answer over UCX within {CONNECT_TIMEOUT_S:g} s ({_devices()})")
        error = handshake.exception()
        if error is not None:
            raise ConnectFailed(f"cannot reach {address} over UCX ({_devices()}): {error!r}") from error
        return self._adopt(handshake.result(), address)

    def _park(self, address: str, handshake: asyncio.Task[Any]) -> None:
        if address in self._parked:
            handshake.add_done_callback(_discard)
        else:
            self._parked[address] = handshake
            handshake.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _adopt(self, endpoint: Any, peer: str) -> UcxConnection:
        self._connections = {c for c in self._connections if not c.closed}
        connection = UcxConnection(endpoint, peer)
        self._connections.add(connection)
        return connection

    async def lane(self, connection: Connection) -> str:
        assert isinstance(connection, UcxConnection)
        return connection.lane()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in [task for tasks in self._tasks.values() for task in tasks]:
            task.cancel()
        for connection in list(self._connections):
            connection.abort()
        for address in list(self._listeners):
            await self.stop_listening(address)
        await asyncio.gather(*(connection.settled() for connection in self._connections))
        self._connections.clear()
        for handshake in self._parked.values():
            handshake.add_done_callback(_discard)
        self._parked.clear()
        _reset()


class UcxConnection(Connection):
    def __init__(self, endpoint: Any, peer: str) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self._pending: set[asyncio.Future[None]] = set()
        self._aborted = False

    async def send(self, buffer: Any, channel: Channel) -> None:
        await self._run(self._endpoint.send(buffer, tag=int(channel)))

    async def recv(self, buffer: Any, channel: Channel) -> None:
        await self._run(self._endpoint.recv(buffer, tag=int(channel)))

    async def _run(self, operation: Any) -> None:
        """As a task of its own, so that a cancelled caller leaves the request, and the buffer it fills, known to us:
        the library goes on with it either way."""
        if self._aborted:
            operation.close()
            raise ConnectionLost(f"the connection to {self.peer} has ended")
        task: asyncio.Future[None] = asyncio.ensure_future(operation)
        self._pending.add(task)
        task.add_done_callback(self._forget)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the library reports an ended endpoint so
                raise ConnectionLost(f"the connection to {self.peer} was closed") from None
            raise
        except Exception as error:  # the library's own tree of exceptions ends here
            raise ConnectionLost(f"the connection to {self.peer} was lost: {error!r}") from error

    def _forget(self, task: asyncio.Future[None]) -> None:
        self._pending.discard(task)
        if not task.cancelled():
            task.exception()  # marked as seen: a caller that has left does not ask for it

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            with contextlib.suppress(Exception):
                self._endpoint.abort(period=ABORT_NS)

    async def settled(self) -> bool:
        if self._pending:
            await asyncio.wait(set(self._pending), timeout=SETTLE_S)
        return not self._pending

    @property
    def closed(self) -> bool:
        return self._aborted or bool(_value(self._endpoint.closed))

    def lane(self) -> str:
        try:
            return ", ".join(sorted(set(ep_lanes(int(self._endpoint.ucp_endpoint))))) or "unknown"
        except (OSError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            logger.warning("UCX does not say which lane carries the bytes: %s", error)
            return "unknown (" + ",".join(sorted(_transports())) + " available)"


async def _handshake(address: str) -> Any:
    """Never cancelled once it has begun. A name is resolved here: it may have several addresses, of which UCX
    listens on those of IPv4 only, and UCX takes only a numeric one."""
    host, _, port = address.rpartition(":")
    infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    infos.sort(key=lambda info: info[0] != socket.AF_INET)
    return await ucx.create_endpoint(infos[0][4][0], int(port), **_patience())


def _patience() -> dict[str, float]:
    return {"connect_timeout": NEVER_S} if ucx.__name__ == "ucxx" else {}


def _discard(handshake: asyncio.Task[Any]) -> None:
    if not handshake.cancelled() and handshake.exception() is None:
        with contextlib.suppress(Exception):
            handshake.result().abort()


def _value(attribute: Any) -> Any:
    """ucxx has properties where UCX-Py has methods."""
    return attribute() if callable(attribute) else attribute


class _TransportEntry(ctypes.Structure):
    _fields_ = [("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p)]


class _EndpointAttributes(ctypes.Structure):
    """ucp_ep_attr_t of ucp.h, UCX 1.13 and later."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p),
    ]


_FIELD_TRANSPORTS = 1 << 3
MAX_LANES = 16


def ep_lanes(handle: int) -> list[str]:
    """transport/device of each lane of a UCX endpoint, from ucp_ep_query: what UCX chose, not what it might."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if re.search(r"/libucp[-.\w]*\.so", line)}
    if not paths:
        raise OSError("libucp is not loaded")
    entries = (_TransportEntry * MAX_LANES)()
    attributes = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS,
        entries=entries,
        num_entries=MAX_LANES,
        entry_size=ctypes.sizeof(_TransportEntry),
    )
    query = ctypes.CDLL(paths.pop()).ucp_ep_query
    query.argtypes = [ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes)]
    status = query(handle, ctypes.byref(attributes))
    if status != 0:
        raise RuntimeError(f"ucp_ep_query returned {status}")
    used = entries[: attributes.num_entries]
    # An entry without a device is the lane that only sets the connection up.
    return [f"{e.transport_name.decode()}/{e.device_name.decode()}" for e in used if e.device_name]


def _transports() -> set[str]:
    getter = getattr(ucx, "get_active_transports", None)
    return set(getter()) if getter is not None else set()


def _devices() -> str:
    chosen = {name: os.environ[name] for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ}
    return f"transports {', '.join(sorted(_transports()))}; {chosen or 'no UCX_TLS or UCX_NET_DEVICES set'}"


_initialised = False


def _init() -> None:
    """Once a process, inside its event loop. Spawned processes only: UCX does not survive a fork."""
    global _initialised
    if _initialised:
        return
    try:
        if ucx.__name__ == "ucxx":
            ucx.init(progress_mode="thread", enable_python_future=True)
        else:
            ucx.init(blocking_progress_mode=True)
    except Exception as error:
        raise FabricUnavailable(f"UCX does not start: {error}") from error
    _initialised = True


def _reset() -> None:
    """Without it a process hangs at its end. Every endpoint and listener must be unreachable before."""
    global _initialised
    gc.collect()
    try:
        ucx.reset()
    except Exception as error:
        # A handshake that never ended keeps the library alive; the process still ends.
        logger.debug("UCX was not reset: %r", error)
    _initialised = False
