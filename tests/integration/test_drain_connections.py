"""A process that drains gives up kept connections: the next request of their clients goes to another process."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.lifecycle import Listener, bind, serve

GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


class Server:
    """/quick answers, /slow answers once `answer` is set."""

    def __init__(self) -> None:
        self.arrived, self.answer, self.is_idle = asyncio.Event(), asyncio.Event(), False
        self.said: list[str] = []
        self.sock = bind("127.0.0.1:0")
        self.port = self.sock.getsockname()[1]
        routes = [Route("/quick", self._quick), Route("/slow", self._slow)]
        self._listener = Listener(Starlette(routes=routes), "127.0.0.1", self.port)

    async def start(self, leave_s: float) -> asyncio.Task[int]:
        serving = asyncio.create_task(
            serve(
                [(self._listener, self.sock)],
                on_leave=lambda: self.said.append("leave"),
                on_drain=lambda: self.said.append("drain"),
                is_idle=lambda: self.is_idle,
                leave_s=leave_s,
                drain_s=20.0,
            )
        )
        while not self._listener.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        return serving

    async def _quick(self, _: Request) -> Response:
        return PlainTextResponse("quick")

    async def _slow(self, _: Request) -> Response:
        self.arrived.set()
        await self.answer.wait()
        return PlainTextResponse("slow")


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    with server.sock:
        async with asyncio.timeout(30):
            yield server


async def test_in_a_drain_kept_connections_end_at_once_and_busy_ones_after_their_answer(server: Server) -> None:
    serving = await server.start(leave_s=0.0)
    async with connected(server) as (kept, kept_writer), connected(server) as (busy, busy_writer):
        kept_writer.write(GET % b"/quick")
        assert await kept.readuntil(b"quick")
        busy_writer.write(GET % b"/slow")
        await server.arrived.wait()

        os.kill(os.getpid(), signal.SIGTERM)
        assert await kept.read() == b"", "the server closed the connection that nobody used"
        async with connected(server) as (new, new_writer):
            new_writer.write(GET % b"/quick")
            assert await new.readuntil(b"quick"), "and still takes new ones"

        server.answer.set()
        assert (await busy.read()).endswith(b"slow"), "answered, then closed"
        server.is_idle = True
        assert await serving == 0


async def test_while_leaving_each_connection_is_closed_by_its_next_answer_and_says_so(server: Server) -> None:
    serving = await server.start(leave_s=60.0)
    async with connected(server) as (kept, kept_writer):
        kept_writer.write(GET % b"/quick")
        assert b"connection: close" not in await kept.readuntil(b"quick")

        os.kill(os.getpid(), signal.SIGTERM)
        while not server.said:  # noqa: ASYNC110 - a plain list
            await asyncio.sleep(0.01)
        kept_writer.write(GET % b"/quick")
        answer = await kept.read()
        assert b"connection: close" in answer
        assert answer.endswith(b"quick"), "taken, answered, and the connection ended"
        assert server.said == ["leave"]

        os.kill(os.getpid(), signal.SIGTERM)
        assert await serving == 0, "a second signal ends the wait"
        assert server.said == ["leave", "drain"]
