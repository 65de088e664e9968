"""The control messages of the fabric: typed, bounded, msgpack. Pure.

    sender -> receiver    Hello, Open, Segment (its bytes follow on the payload channel), Renew, Commit, Abort
    receiver -> sender    HelloReply, Resend, Ack, Abort

A control message is one fabric message of at most CONTROL_BYTES: a 4-byte little-endian length, then msgpack.
"""

from __future__ import annotations

import struct

import msgspec

from transport.errors import WireError

WIRE_VERSION = 1
CONTROL_BYTES = 16 << 10
MAX_META_BYTES = 8 << 10
MAX_REASON_CHARS = 500
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of every control message."""


class Hello(Message, frozen=True, tag="hello"):
    incarnation: str
    fingerprint: dict[str, str | int]
    wire_version: int = WIRE_VERSION

    def difference(self, other: Hello) -> str | None:
        """Name of the first thing that keeps these two from being a pair, or None."""
        if self.wire_version != other.wire_version:
            return "wire_version"
        for name in sorted({*self.fingerprint, *other.fingerprint}):
            if self.fingerprint.get(name) != other.fingerprint.get(name):
                return name
        return None


class HelloReply(Message, frozen=True, tag="hello-reply"):
    hello: Hello
    refused: str = ""
    """Why this pair will not work; empty when it will."""


class Handed(Message, frozen=True):
    """Fields of every message about one attempt of one handoff."""

    handoff_id: bytes
    attempt: int


class Open(Handed, frozen=True, tag="open"):
    key: bytes
    start: int
    end: int


class Segment(Handed, frozen=True, tag="segment"):
    start: int
    num_tokens: int
    num_bytes: int
    checksum: int


class Commit(Handed, frozen=True, tag="commit"):
    digest: int
    meta: bytes


class Renew(Handed, frozen=True, tag="renew"):
    """The sender still works on it."""


class Resend(Handed, frozen=True, tag="resend"):
    start: int
    num_tokens: int


class Ack(Handed, frozen=True, tag="ack"):
    """Every byte was verified and written; the commit is accepted."""


class Abort(Handed, frozen=True, tag="abort"):
    reason: str


Control = Hello | HelloReply | Open | Segment | Commit | Renew | Resend | Ack | Abort


def encode(message: Control) -> bytes:
    body = _encoder.encode(message)
    if _LENGTH.size + len(body) > CONTROL_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {CONTROL_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(data: bytes | bytearray | memoryview) -> Control:
    """Of a received control buffer, whatever follows the message in it. Raises WireError."""
    if len(data) < _LENGTH.size:
        raise WireError("a control message shorter than its length field")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(CONTROL_BYTES, len(data)) - _LENGTH.size:
        raise WireError(f"a control message that says {length} bytes")
    try:
        message: Control = _decoder.decode(bytes(data[_LENGTH.size : _LENGTH.size + length]))
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"not a control message: {error}") from error
    return message


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
