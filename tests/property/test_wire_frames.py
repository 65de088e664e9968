"""Any bytes are a control message or a WireError, and every message survives the wire."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transport import messages
from transport.errors import WireError
from transport.messages import Abort, Ack, Alive, Commit, Hello, HelloReply, Open, Renew, Resend, Segment

counts = st.integers(0, 1 << 40)
words = st.integers(0, (1 << 64) - 1)
ids = st.binary(min_size=16, max_size=16)
text = st.text(max_size=40)
hellos = st.builds(Hello, text, st.dictionaries(text, text | st.integers(-(1 << 63), (1 << 63) - 1), max_size=8))
controls = st.one_of(
    hellos,
    st.builds(HelloReply, hellos, text),
    st.builds(Open, ids, counts, st.binary(max_size=64), counts, counts),
    st.builds(Segment, ids, counts, counts, counts, counts, words),
    st.builds(Commit, ids, counts, words, st.binary(max_size=messages.MAX_META_BYTES)),
    st.builds(Renew, ids, counts),
    st.builds(Alive, ids, counts),
    st.builds(Resend, ids, counts, counts, counts),
    st.builds(Ack, ids, counts),
    st.builds(Abort, ids, counts, st.text(max_size=messages.MAX_REASON_CHARS)),
)


@given(controls, st.binary(max_size=64))
def test_a_message_survives_the_wire_whatever_follows_it(message: messages.Control, rest: bytes) -> None:
    assert messages.decode(messages.encode(message) + rest) == message


@given(controls)
def test_a_message_fits_the_posted_buffer(message: messages.Control) -> None:
    assert len(messages.encode(message)) <= messages.CONTROL_BYTES


@given(st.binary(max_size=2048))
def test_random_bytes_are_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        messages.decode(data)


@given(st.binary(max_size=2048))
def test_random_msgpack_under_a_right_header_is_a_message_or_an_error(body: bytes) -> None:
    _decode_or_error(_framed(body))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.floats()
        | text
        | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=6),
        max_leaves=20,
    ),
    st.sampled_from(["hello", "open", "segment", "commit", "ack", "abort", "nothing"]),
)
def test_well_formed_msgpack_of_the_wrong_shape_is_an_error(value: object, tag: str) -> None:
    body = {"t": tag, "handoff_id": b"x" * 16, "attempt": value, "digest": value, "meta": value, "start": value}
    _decode_or_error(_framed(msgspec.msgpack.encode(body)))


@given(controls, st.data())
def test_one_flipped_bit_is_always_noticed(message: messages.Control, data: st.DataObject) -> None:
    frame = bytearray(messages.encode(message))
    at = data.draw(st.integers(0, len(frame) * 8 - 1))
    frame[at // 8] ^= 1 << at % 8
    with pytest.raises(WireError):
        messages.decode(frame)


@given(controls, st.data())
def test_a_message_cut_short_is_never_completed_by_an_earlier_one(
    message: messages.Control, data: st.DataObject
) -> None:
    frame = messages.encode(message)
    earlier = messages.encode(Commit(b"e" * 16, 1, 1, bytes(1000)))
    cut = data.draw(st.integers(0, len(frame) - 1))
    buffer = frame[:cut] + earlier[cut:].ljust(messages.CONTROL_BYTES, b"\0")
    if cut == 0 or buffer[: len(frame)] == frame:
        return
    with pytest.raises(WireError):
        messages.decode(buffer)


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(WireError):
        messages.decode(_framed(b"\x91" * 15_000 + b"\xc0"))


@pytest.mark.parametrize("length", [messages.CONTROL_BYTES, 1 << 31, (1 << 32) - 1])
def test_a_length_over_the_limit_is_refused_before_the_body_is_looked_at(length: int) -> None:
    with pytest.raises(WireError, match="says"):
        messages.decode(struct.pack("<IQ", length, 0) + bytes(100))


def _framed(body: bytes) -> bytes:
    return struct.pack("<IQ", len(body), xxhash.xxh3_64_intdigest(body)) + body


def _decode_or_error(frame: bytes) -> None:
    try:
        message = messages.decode(frame)
    except WireError:
        return
    assert messages.decode(messages.encode(message)) == message
