"""Many endpoints to one listener at once, each with one message, all closed together, over and over.

    python -m tests.support.many_endpoints NUM_ENDPOINTS NUM_ROUNDS

Two processes: this one connects, the one it starts listens. Status 0 when every message arrived in every round and
both ended by themselves.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np

from transport.plane import Channel, Connection
from transport.ucx import UcxPlane

DEADLINE_S = 60.0


async def listen() -> None:
    """Prints its address, then how many messages have come, at each line that is read."""
    plane = UcxPlane()
    seen: set[int] = set()

    async def serve(connection: Connection) -> None:
        buffer = np.zeros(8, dtype=np.uint8)
        await connection.recv(buffer, Channel.CONTROL)
        seen.add(int(buffer.view(np.uint64)[0]))
        await connection.recv(buffer, Channel.CONTROL)  # ends when the other side closes

    print(await plane.listen(serve), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        wanted = int(line)
        while len(seen) < wanted:  # noqa: ASYNC110 - the deadline is the caller's
            await asyncio.sleep(0.01)
        print(len(seen), flush=True)
    await plane.close()


async def connect(num_endpoints: int, num_rounds: int) -> None:
    command = [sys.executable, "-m", "tests.support.many_endpoints", "listen"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:  # noqa: ASYNC220 - started before anything else
        assert listener.stdin is not None
        assert listener.stdout is not None
        try:
            address = listener.stdout.readline().strip()
            async with asyncio.timeout(DEADLINE_S):
                await _rounds(address, listener, num_endpoints, num_rounds)
            listener.stdin.close()
            assert listener.wait(10) == 0, "the listener ended by itself"
        finally:
            listener.kill()


async def _rounds(address: str, listener: subprocess.Popen[str], num_endpoints: int, num_rounds: int) -> None:
    assert listener.stdin is not None
    assert listener.stdout is not None
    plane = UcxPlane()
    try:
        for turn in range(num_rounds):
            connections = await asyncio.gather(*(plane.connect(address) for _ in range(num_endpoints)))
            first = turn * num_endpoints
            await asyncio.gather(*(_message(c, first + i) for i, c in enumerate(connections)))
            listener.stdin.write(f"{first + num_endpoints}\n")
            listener.stdin.flush()
            assert int(await asyncio.to_thread(listener.stdout.readline)) == first + num_endpoints
            for connection in connections:
                connection.abort()
    finally:
        await plane.close()


async def _message(connection: Connection, number: int) -> None:
    await connection.send(np.array([number], dtype=np.uint64).view(np.uint8), Channel.CONTROL)


if __name__ == "__main__":
    asyncio.run(listen() if sys.argv[1] == "listen" else connect(int(sys.argv[1]), int(sys.argv[2])))
