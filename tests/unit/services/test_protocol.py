from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services import protocol
from services.protocol import Busy, Failure, Finish, Frame, ProtocolError, Stats, Tokens

FRAMES: list[Frame] = [
    Busy(message="full"),
    Tokens(index=3, token_ids=[1, 2], logprobs=[protocol.TokenLogprob(logprob=-0.5, top=[(1, -0.5)])]),
    Failure(message="no", kind="transfer"),
    Finish(reason="stop", stats=Stats(queue_s=0.5, transfer_bytes=7, lane="tcp")),
]


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(*parts: bytes) -> list[Frame]:
    return [frame async for frame in protocol.iter_frames(chunks(*parts))]


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
async def test_frames_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    data = b"".join(protocol.encode_frame(frame) for frame in FRAMES)
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert await read(*(data[a:b] for a, b in itertools.pairwise(borders))) == FRAMES


async def test_a_stream_cut_inside_a_frame_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="inside a frame"):
        await read(protocol.encode_frame(FRAMES[0])[:-1])


async def test_a_length_is_checked_before_anything_is_kept_for_it() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        await read(b"\xff\xff\xff\xff")


_DECODERS = (
    protocol.decode_generate,
    protocol.decode_prefill,
    protocol.decode_hold,
    protocol.decode_ship,
    protocol.decode_worker_info,
    protocol.decode_handoff_state,
)


@given(body=st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_protocol_error(body: bytes) -> None:
    for decode in _DECODERS:
        with pytest.raises(ProtocolError):
            decode(body)


def test_another_version_an_unknown_field_and_a_wrong_type_are_refused() -> None:
    work = protocol.Work(
        request_id="r", prompt_token_ids=[1], sampling=protocol.Sampling(max_tokens=1, seed=0), deadline_s=1.0
    )
    request = protocol.GenerateRequest(work=work)
    assert protocol.decode_generate(protocol.encode(request)) == request
    with pytest.raises(ProtocolError, match="version 3"):
        protocol.decode_generate(protocol.encode(protocol.GenerateRequest(work=work, version=3)))
    for wrong in ({"work": {}}, {"work": protocol.msgspec.to_builtins(work), "extra": 1}):
        with pytest.raises(ProtocolError):
            protocol.decode_generate(protocol.msgspec.msgpack.encode(wrong))


def test_a_fingerprint_names_the_first_field_that_differs() -> None:
    one = protocol.Fingerprint(wire_version=1, model="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8)
    assert one.difference(one) is None
    assert one.difference(protocol.msgspec.structs.replace(one, head_dim=16)) == "head_dim"


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), -1.0])
def test_a_deadline_is_a_time(deadline_s: float) -> None:
    """NaN passes no comparison, and a timer that is set to it never fires."""
    work = protocol.Work(
        request_id="r", prompt_token_ids=[1], sampling=protocol.Sampling(max_tokens=1, seed=0), deadline_s=deadline_s
    )
    with pytest.raises(ProtocolError, match="deadline_s"):
        protocol.decode_generate(protocol.encode(protocol.GenerateRequest(work=work)))
