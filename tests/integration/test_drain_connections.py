"""A process that drains gives up kept connections: the next request of their clients goes to another process."""

import asyncio
import os
import signal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from services.lifecycle import Listener, bind, serve

GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


async def test_kept_connections_end_at_once_and_busy_ones_after_their_answer() -> None:
    arrived, answer, idle = asyncio.Event(), asyncio.Event(), False

    async def quick(_: Request) -> Response:
        return PlainTextResponse("quick")

    async def slow(_: Request) -> Response:
        arrived.set()
        await answer.wait()
        return PlainTextResponse("slow")

    sock = bind("127.0.0.1:0")
    port = sock.getsockname()[1]
    listener = Listener(Starlette(routes=[Route("/quick", quick), Route("/slow", slow)]), "127.0.0.1", port)
    serving = asyncio.create_task(serve([(listener, sock)], on_drain=lambda: None, is_idle=lambda: idle, drain_s=20.0))
    async with asyncio.timeout(20):
        while not listener.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        kept_reader, kept_writer = await asyncio.open_connection("127.0.0.1", port)
        kept_writer.write(GET % b"/quick")
        assert await kept_reader.readuntil(b"quick")
        busy_reader, busy_writer = await asyncio.open_connection("127.0.0.1", port)
        busy_writer.write(GET % b"/slow")
        await arrived.wait()

        os.kill(os.getpid(), signal.SIGTERM)
        assert await kept_reader.read() == b"", "the server closed the connection that nobody used"
        new_reader, new_writer = await asyncio.open_connection("127.0.0.1", port)
        new_writer.write(GET % b"/quick")
        assert await new_reader.readuntil(b"quick"), "and still takes new ones"

        answer.set()
        assert (await busy_reader.read()).endswith(b"slow"), "answered, then closed"
        idle = True
        assert await serving == 0
    for writer in (kept_writer, busy_writer, new_writer):
        writer.close()
