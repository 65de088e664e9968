"""The control messages of the fabric: typed, bounded, msgpack. Pure.

    sender -> receiver    Hello, Open, Segment (its bytes follow on the payload channel), Renew, Commit, Abort
    receiver -> sender    HelloReply, Resend, Ack, Alive, Abort

A control message is one fabric message of at most CONTROL_BYTES: length and XXH3 of the body, little-endian, then
msgpack. A fabric does not say how much of a buffer a message filled: the length and the digest do, so that what an
earlier message left there, or a damaged byte, is never taken for a message.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
from msgspec import Meta

from transport.checksum import checksum
from transport.errors import WireError

WIRE_VERSION = 1
CONTROL_BYTES = 16 << 10
MAX_META_BYTES = 8 << 10
MAX_REASON_CHARS = 500
_HEADER = struct.Struct("<IQ")

HandoffId = Annotated[bytes, Meta(min_length=1, max_length=64)]
Count = Annotated[int, Meta(ge=0, le=(1 << 40))]
Text = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of every control message."""


class Hello(Message, frozen=True, tag="hello"):
    incarnation: Text
    fingerprint: Annotated[dict[Text, Text | int], Meta(max_length=64)]
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
    refused: Text = ""
    """Why this pair will not work; empty when it will."""


class Handed(Message, frozen=True):
    """Fields of every message about one attempt of one handoff."""

    handoff_id: HandoffId
    attempt: Count


class Open(Handed, frozen=True, tag="open"):
    key: Annotated[bytes, Meta(max_length=64)]
    start: Count
    end: Count


class Segment(Handed, frozen=True, tag="segment"):
    start: Count
    num_tokens: Count
    num_bytes: Count
    checksum: int


class Commit(Handed, frozen=True, tag="commit"):
    digest: int
    meta: Annotated[bytes, Meta(max_length=MAX_META_BYTES)]


class Renew(Handed, frozen=True, tag="renew"):
    """The sender still works on it."""


class Alive(Handed, frozen=True, tag="alive"):
    """The answer to Renew: a sender that hears nothing for too long gives the receiver up."""


class Resend(Handed, frozen=True, tag="resend"):
    start: Count
    num_tokens: Count


class Ack(Handed, frozen=True, tag="ack"):
    """Every byte was verified and written; the commit is accepted."""


class Abort(Handed, frozen=True, tag="abort"):
    reason: Text


Control = Hello | HelloReply | Open | Segment | Commit | Renew | Alive | Resend | Ack | Abort


def encode(message: Control) -> bytes:
    body = _encoder.encode(message)
    if _HEADER.size + len(body) > CONTROL_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {CONTROL_BYTES}")
    return _HEADER.pack(len(body), checksum(body)) + body


def decode(data: bytes | bytearray | memoryview) -> Control:
    """Of a received control buffer, whatever follows the message in it. Raises WireError."""
    if len(data) < _HEADER.size:
        raise WireError("a control message shorter than its header")
    length, digest = _HEADER.unpack_from(data)
    if length > min(CONTROL_BYTES, len(data)) - _HEADER.size:
        raise WireError(f"a control message that says {length} bytes")
    body = bytes(data[_HEADER.size : _HEADER.size + length])
    if checksum(body) != digest:
        raise WireError("a control message that does not match its checksum")
    try:
        message: Control = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a control message: {error}") from error
    return message


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)
