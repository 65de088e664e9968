"""The contract of a plane, as bodies that run over each implementation, in a process of their own:

    python -m tests.support.plane_bodies ucx a_transfer_arrives

Ends with status 0 when the body held, within its deadline, and the process came to its end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from tests.support.kv_pair import KEY, LAYOUT, NUM_TOKENS, Blocks, Pair, kv
from transport.control import recv_control, send_control
from transport.errors import ConnectFailed, ConnectionLost, PairingRefused, TransferError
from transport.messages import Hello, HelloReply, Segment
from transport.plane import Channel, Connection, Plane
from transport.probe import probe
from transport.receiver import Grant
from transport.shipment import Shipment

DEADLINE_S = 60.0
Body = Callable[[Plane], Awaitable[None]]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


@body
async def messages_arrive_whole_and_in_order_on_both_channels(plane: Plane) -> None:
    sizes = [1, 100, 4096, 1 << 20, 3 << 20]
    arrived: asyncio.Queue[list[bytes]] = asyncio.Queue()

    async def serve(connection: Connection) -> None:
        got = []
        for channel in Channel:
            for size in sizes:
                buffer = np.zeros(4 << 20, dtype=np.uint8)
                await connection.recv(buffer, channel)
                got.append(buffer[:size].tobytes())
                assert not buffer[size:].any(), "nothing is written past a shorter message"
        arrived.put_nowait(got)
        await connection.send(np.ones(1, dtype=np.uint8), Channel.CONTROL)

    connection = await plane.connect(await plane.listen(serve))
    sent = [np.random.default_rng(i).integers(1, 256, size, dtype=np.uint8) for i, size in enumerate(sizes)]

    async def send_all(channel: Channel) -> None:
        for message in sent:
            await connection.send(message, channel)

    await asyncio.gather(*(send_all(channel) for channel in reversed(Channel)))
    assert await arrived.get() == [message.tobytes() for message in sent] * 2
    await connection.recv(np.zeros(1, dtype=np.uint8), Channel.CONTROL)
    connection.abort()


@body
async def a_peer_that_goes_is_noticed(plane: Plane) -> None:
    async def serve(connection: Connection) -> None:
        await connection.recv(np.zeros(1, dtype=np.uint8), Channel.CONTROL)

    connection = await plane.connect(await plane.listen(serve))
    pending = asyncio.ensure_future(connection.recv(np.zeros(10, dtype=np.uint8), Channel.PAYLOAD))
    await connection.send(np.ones(1, dtype=np.uint8), Channel.CONTROL)
    try:
        await pending
    except ConnectionLost:
        connection.abort()
        await connection.settled()
        assert connection.closed
        return
    raise AssertionError("a receive from a peer that has gone returned")


@body
async def nobody_there_is_an_error_within_the_bound(plane: Plane) -> None:
    address = await plane.listen(_ignore, ephemeral=True)
    await plane.stop_listening(address)
    try:
        await plane.connect(address)
    except ConnectFailed as error:
        assert address in str(error)
        return
    raise AssertionError("connected to nobody")


@body
async def many_connections_at_once_open_and_close(plane: Plane) -> None:
    count, arrived = 100, asyncio.Semaphore(0)

    async def serve(connection: Connection) -> None:
        await connection.recv(np.zeros(8, dtype=np.uint8), Channel.CONTROL)
        arrived.release()
        await connection.recv(np.zeros(8, dtype=np.uint8), Channel.CONTROL)

    address = await plane.listen(serve)
    connections = await asyncio.gather(*(plane.connect(address) for _ in range(count)))
    await asyncio.gather(*(c.send(np.ones(8, dtype=np.uint8), Channel.CONTROL) for c in connections))
    for _ in range(count):
        await arrived.acquire()
    for connection in connections:
        connection.abort()


@body
async def the_probe_moves_bytes_and_names_the_lane(plane: Plane) -> None:
    for _ in range(2):
        result = await probe(plane, LAYOUT, 16)
        assert result.num_bytes == 16 * LAYOUT.bytes_per_token
        assert result.lane
        assert "unknown" not in result.lane


@body
async def a_transfer_arrives(plane: Plane) -> None:
    """Chunk by chunk, several at once over one connection, each acknowledged, byte for byte."""
    pair = Pair(plane)
    await pair.receiver.start()

    async def one(number: int) -> None:
        blocks = pair.blocks = Blocks()
        shipment = await pair.open(number)
        for upto in (8, 100, 101, 500, NUM_TOKENS):
            await shipment.ship(upto)
        stats = await shipment.commit(b"meta")
        assert await blocks.outcome == ("committed", b"meta")
        assert stats.num_bytes == (NUM_TOKENS - 8) * LAYOUT.bytes_per_token
        assert b"".join(blocks.tokens[i] for i in range(8, NUM_TOKENS)) == kv(8, NUM_TOKENS - 8).tobytes()
        assert len(blocks.tokens) == NUM_TOKENS - 8

    for first in (0, 10):
        await asyncio.gather(*(one(first + i) for i in range(4)))
    assert pair.receiver.snapshot()["committed"] == pair.sender.snapshot()["acked"] == 8
    assert pair.sender.snapshot()["connects"] == 1
    await pair.close()


@body
async def a_pair_that_does_not_match_is_refused_by_the_name_of_the_field(plane: Plane) -> None:
    pair = Pair(plane, head_dim=128)
    await pair.receiver.start()
    for options, named in (({}, "head_dim"), ({"peer_incarnation": "an earlier one"}, "incarnation")):
        if named == "incarnation":
            pair.sender.hello = Hello("prefill", {"model": "m", "head_dim": 64})
        try:
            await pair.open(len(named), **options)
        except PairingRefused as error:
            assert named in str(error), error
        else:
            raise AssertionError(f"paired in spite of {named}")
    for number in (len("head_dim"), len("incarnation")):
        pair.receiver.cancel(number.to_bytes(16, "big"))
    await pair.close()


@body
async def a_wrong_key_opens_nothing(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    shipment = await pair.open(key=b"guess" * 6)
    await _fails(shipment)
    assert not pair.blocks.outcome.done(), "a stranger must not end what it does not own"
    assert not pair.blocks.tokens
    pair.receiver.cancel(bytes(16))
    await pair.close()


@body
async def either_side_giving_up_is_told_to_the_other_at_once(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    shipment = await pair.open(1)
    await shipment.ship(100)
    await shipment.abort("too long")
    await shipment.abort("twice is allowed")
    outcome, reason = await pair.blocks.outcome
    assert outcome == "failed"
    assert "too long" in reason
    pair.blocks = Blocks()
    shipment = await pair.open(2)
    await shipment.ship(100)
    pair.receiver.cancel((2).to_bytes(16, "big"))
    await _fails(shipment)
    assert not pair.blocks.outcome.done(), "who has cancelled is not called again"
    await pair.close()


@body
async def a_reservation_nobody_ships_to_expires(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    grant = Grant(bytes(16), attempt=1, key=KEY, start=0, end=8, lease_s=0.2, sender="prefill")
    pair.receiver.expect(grant, pair.blocks)
    outcome, reason = await pair.blocks.outcome
    assert outcome == "failed"
    assert "lease" in reason
    await pair.close()


@body
async def an_open_transfer_outlives_its_lease_while_the_prompt_waits(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    shipment = await pair.open(lease_s=2.5)
    await asyncio.sleep(4.0)  # as long as a busy prefill worker may be silent: the sender renews by itself
    assert not pair.blocks.outcome.done()
    await shipment.ship(NUM_TOKENS)
    await shipment.commit(b"")
    await pair.close()


@body
async def damaged_bytes_are_never_written_and_are_sent_again(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    shipment = await pair.open()
    damage = _damage_payloads(shipment, count=2)
    await shipment.ship(NUM_TOKENS)
    stats = await shipment.commit(b"")
    assert damage.done == 2
    assert stats.num_resent == 2
    assert pair.receiver.snapshot()["damaged"] == 2
    assert b"".join(pair.blocks.tokens[i] for i in range(8, NUM_TOKENS)) == kv(8, NUM_TOKENS - 8).tobytes()
    pair.blocks = Blocks()
    shipment = await pair.open(1)
    _damage_payloads(shipment, count=10**9)
    await shipment.ship(NUM_TOKENS)
    await _fails(shipment)
    assert (await pair.blocks.outcome)[0] == "failed"
    assert not pair.blocks.tokens
    await pair.close()


@body
async def garbage_ends_its_own_connection_and_no_other(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    good = await pair.open()
    for junk in (b"\xff" * 100, b"", b"\x05\x00\x00\x00junk!"):
        stranger = await plane.connect(pair.receiver.address)
        await stranger.send(np.frombuffer(junk + b"\0", dtype=np.uint8), Channel.CONTROL)
        try:
            await stranger.recv(np.zeros(64, dtype=np.uint8), Channel.CONTROL)
        except ConnectionLost:
            stranger.abort()
        else:
            raise AssertionError("a stranger was answered")
    await good.ship(NUM_TOKENS)
    await good.commit(b"")
    await pair.close()


@body
async def whoever_shows_no_key_takes_no_memory_from_others(plane: Plane) -> None:
    """Strangers that greet well announce payloads that never come, on more connections than there are buffers."""
    pair = Pair(plane)
    await pair.receiver.start()
    strangers = []
    for number in range(12):
        stranger = await plane.connect(pair.receiver.address)
        await send_control(stranger, Hello(f"stranger {number}", pair.sender.hello.fingerprint))
        reply = await recv_control(stranger)
        assert isinstance(reply, HelloReply)
        assert not reply.refused
        for start in (0, 1):
            await send_control(stranger, Segment(b"nobody's handoff", 1, start, 1, LAYOUT.bytes_per_token, 0))
        strangers.append(stranger)
    shipment = await pair.open()
    await shipment.ship(NUM_TOKENS)
    await shipment.commit(b"")
    for stranger in strangers:
        stranger.abort()
    await pair.close()


@body
async def a_stranger_learns_what_differs_and_nothing_more(plane: Plane) -> None:
    pair = Pair(plane)
    await pair.receiver.start()
    stranger = await plane.connect(pair.receiver.address)
    await send_control(stranger, Hello("stranger", {"model": "guess"}))
    reply = await recv_control(stranger)
    assert isinstance(reply, HelloReply)
    assert "differs" in reply.refused
    assert not reply.hello.fingerprint
    stranger.abort()
    await pair.close()


async def _ignore(connection: Connection) -> None:
    await connection.recv(np.zeros(1, dtype=np.uint8), Channel.CONTROL)


async def _fails(shipment: Shipment) -> None:
    try:
        await shipment.ship(NUM_TOKENS)
        await shipment.commit(b"")
    except TransferError:
        return
    raise AssertionError("the commit was acknowledged")


class _Damage:
    def __init__(self) -> None:
        self.done = 0


def _damage_payloads(shipment: Shipment, count: int) -> _Damage:
    """Flip a byte of the next `count` payloads on their way out, after their checksum was taken."""
    damage, connection = _Damage(), shipment._peer._connection
    send = connection.send

    async def damaging(buffer: Any, channel: Channel) -> None:
        if channel is Channel.PAYLOAD and damage.done < count:
            damage.done += 1
            buffer = buffer.copy()
            buffer[len(buffer) // 2] ^= 0x10
        await send(buffer, channel)

    connection.send = damaging  # type: ignore[method-assign]
    return damage


async def _main(plane_name: str, body_name: str) -> None:
    plane: Plane
    if plane_name == "ucx":
        from transport.ucx import UcxPlane

        plane = UcxPlane()
    else:
        from transport.inproc import InprocPlane

        plane = InprocPlane()
    try:
        async with asyncio.timeout(DEADLINE_S):
            await BODIES[body_name](plane)
    finally:
        await plane.close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    ours = [task for task in left if "transport" in str(task.get_coro())]
    assert not ours, f"tasks left: {ours}"


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
