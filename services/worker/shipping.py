"""The sending of one request's KV, whoever has it: a prefill worker, or a decode worker that hands its request on."""

from __future__ import annotations

from engine import messages
from engine.messages import Buffer
from services.protocol import Handoff, HandoffState, Reservation, Stats, encode
from services.worker.convert import wire_stats
from services.worker.engine_client import EngineClient
from transport.sender import KvSender
from transport.shipment import Shipment
from transport.transfer import TransferStats


async def open_shipment(
    sender: KvSender,
    engine: EngineClient,
    request_id: str,
    handoff: Handoff,
    reservation: Reservation,
    *,
    end: int,
    deadline_s: float,
) -> Shipment:
    """A transfer of tokens [reservation.num_cached_tokens, end) of a request of this engine. Whoever opens it aborts
    it in the end, which after a commit does nothing. Raises TransportError."""

    async def read(start: int, num_tokens: int, buffer: Buffer) -> bool:
        return await engine.read_kv(request_id, start, num_tokens, buffer)

    return await sender.open(
        reservation.fabric_address,
        peer_incarnation=handoff.decode_incarnation,
        handoff_id=handoff.handoff_id,
        attempt=handoff.attempt,
        key=handoff.key,
        start=reservation.num_cached_tokens,
        end=end,
        deadline_s=deadline_s,
        read=read,
    )


async def hand_over(shipment: Shipment, num_tokens: int, state: HandoffState) -> TransferStats:
    """Ship what is left of [0, num_tokens) and commit; returns when the receiver has acknowledged."""
    await shipment.ship(num_tokens)
    return await shipment.commit(encode(state))


def shipped_stats(stats: messages.RequestStats, moved: TransferStats, *, waited_s: float) -> Stats:
    return wire_stats(
        stats,
        transfer_bytes=moved.num_bytes,
        transfer_s=moved.seconds,
        transfer_wait_s=waited_s,
        lane=moved.lane,
    )
