from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import messages
from transport.checksum import checksum, digest
from transport.errors import WireError
from transport.layout import KvLayout
from transport.messages import Abort, Ack, Commit, Hello, HelloReply, Open, Renew, Resend, Segment

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="bfloat16")
HELLO = Hello("incarnation", {"model": "m", "num_layers": 3})
MESSAGES = [
    HELLO,
    HelloReply(HELLO, "head_dim differs"),
    Open(b"0" * 16, 1, b"k" * 32, 0, 9),
    Segment(b"0" * 16, 1, 0, 4, 480, 2**64 - 1),
    Commit(b"0" * 16, 1, 7, b"meta"),
    Renew(b"0" * 16, 1),
    Resend(b"0" * 16, 1, 0, 4),
    Ack(b"0" * 16, 1),
    Abort(b"0" * 16, 1, "why"),
]


def test_bytes_per_token_counts_keys_and_values_of_every_layer() -> None:
    assert LAYOUT.bytes_per_token == 2 * 3 * 2 * 5 * 2
    for wrong in ({"dtype": "int3"}, {"num_layers": 0}, {"head_dim": -1}):
        fields = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"} | wrong
        with pytest.raises(ValueError, match=next(iter(wrong))):
            KvLayout(**fields)  # type: ignore[arg-type]


@given(start=st.integers(0, 50), length=st.integers(0, 200), max_bytes=st.integers(1, 5000))
def test_segments_cover_the_range_once_in_order_and_within_the_limit(start: int, length: int, max_bytes: int) -> None:
    segments = list(LAYOUT.segments(start, start + length, max_bytes))
    at = start
    for segment_start, num_tokens in segments:
        assert segment_start == at
        assert num_tokens >= 1
        assert num_tokens == 1 or num_tokens * LAYOUT.bytes_per_token <= max_bytes
        at += num_tokens
    assert at == start + length


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire_with_whatever_follows_it_in_the_buffer(message: messages.Control) -> None:
    encoded = messages.encode(message)
    assert messages.decode(encoded) == message
    assert messages.decode(encoded + b"\xff" * 100) == message
    for cut in range(len(encoded)):
        with pytest.raises(WireError):
            messages.decode(encoded[:cut])


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    try:
        decoded = messages.decode(data)
    except WireError:
        return
    assert isinstance(decoded, messages.Message)


def test_a_length_over_the_limit_is_refused_both_ways() -> None:
    with pytest.raises(WireError, match="says"):
        messages.decode(b"\xff\xff\xff\xff" + b"x" * messages.CONTROL_BYTES)
    with pytest.raises(WireError, match="limit"):
        messages.encode(Abort(b"0" * 16, 1, "x" * messages.CONTROL_BYTES))


def test_a_hello_names_the_field_that_keeps_two_workers_apart() -> None:
    assert HELLO.difference(Hello("another", dict(HELLO.fingerprint))) is None
    assert HELLO.difference(Hello("i", {"model": "m", "num_layers": 4})) == "num_layers"
    assert HELLO.difference(Hello("i", {"model": "m"})) == "num_layers"
    assert HELLO.difference(Hello("i", dict(HELLO.fingerprint), wire_version=2)) == "wire_version"


@given(data=st.binary(min_size=1, max_size=500), at=st.integers(0, 499), flip=st.integers(1, 255))
def test_a_flipped_byte_changes_the_checksum(data: bytes, at: int, flip: int) -> None:
    damaged = bytearray(data)
    damaged[at % len(data)] ^= flip
    assert checksum(data) != checksum(damaged)


def test_a_digest_is_over_what_and_where_not_over_the_order_of_arrival() -> None:
    segments = [(0, 4, 11), (4, 4, 12)]
    assert digest(segments) == digest(reversed(segments))
    assert digest(segments) != digest([(0, 4, 12), (4, 4, 11)])
    assert digest(segments) != digest(segments[:1])
