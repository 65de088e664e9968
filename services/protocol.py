"""What travels between gateway, prefill and decode: frozen types, msgpack, versioned.

    gateway -> decode   POST /v1/generate  GenerateRequest => Busy | (Reserved | Accepted) Tokens* (Finish | Failure)
    gateway -> prefill  POST /v1/prefill   PrefillRequest  => Busy | Tokens? (Transferred | Finish | Failure)

A decode worker that drains says Leaving on its streams; the gateway may then move them, KV and all:

    gateway -> decode   POST /v1/hold      HoldRequest     => Held | Failure      tokens stop, blocks stay
    gateway -> decode   POST /v1/ship      ShipRequest     => Transferred | Failure    to a Reservation elsewhere
    gateway -> worker   GET  /v1/worker                    => WorkerInfo

An answer is a stream of frames, each a 4-byte big-endian length and one msgpack map tagged "t". Closing the
stream is the cancel. A stream that ends without Finish, Failure, Transferred or Busy was cut: the caller treats
that as a failure of the worker. Times are relative seconds, so clocks need not agree.

Decoding checks types against these classes and lengths against MAX_FRAME_BYTES before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterable, AsyncIterator
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 << 20
"""One request or one frame. A prompt of 1 M token ids packs to 5 MB."""
FRAMES_MEDIA_TYPE = "application/vnd.kvbaton.frames"

Role = Literal["prefill", "decode", "both"]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=1e7)]
"""Finite: NaN passes no comparison."""


class ProtocolError(Exception):
    """Bytes that are not a frame of this protocol version."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of every type here."""


# Requests


class Sampling(Message, frozen=True):
    """The wire form of engine.sampling_params.SamplingParams, where the fields are documented."""

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    choice: int = 0
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    bad_words: list[list[int]] = []
    allowed_token_ids: list[int] = []
    grammar: str = ""
    prompt_logprobs: int | None = None

    def of_choice(self, choice: int) -> Sampling:
        return self if choice == self.choice else msgspec.structs.replace(self, choice=choice)


class Work(Message, frozen=True):
    """One choice of one request: what a worker needs to compute it from anywhere in its life."""

    request_id: Name
    """The gateway's own id, unique for each attempt; also the trace id in logs."""
    prompt_token_ids: list[int]
    sampling: Sampling
    deadline_s: Seconds
    """Seconds from receipt after which the worker ends the request by itself."""
    output_token_ids: list[int] = []
    """Already generated, after a retry or a migration."""
    cache_domain: Annotated[bytes, Meta(max_length=256)] = b""


class Handoff(Message, frozen=True):
    """Names one attempt to pass one request from prefill to decode. Minted by the gateway."""

    handoff_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """16 random bytes."""
    attempt: Annotated[int, Meta(ge=1, le=1 << 16)]
    prefill_incarnation: Name
    """The process that ships: a prefill worker, or a decode worker that hands its request on."""
    decode_incarnation: Name
    lease_s: Annotated[float, Meta(gt=0, le=3600)]
    """How long decode keeps the reservation without hearing from prefill."""
    expires_at: Annotated[int, Meta(ge=0, lt=1 << 62)]
    """Seconds of the wall clock after which the key opens nothing: the request's deadline, and room for clocks that
    differ."""
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """HMAC-SHA256 by the service secret over the other fields: see services.auth.handoff_key."""


class GenerateRequest(Message, frozen=True):
    work: Work
    version: int = PROTOCOL_VERSION
    handoff: Handoff | None = None
    """None: the decode worker computes the prompt itself."""
    local_prefill_max_tokens: int = 0
    """With a handoff: an uncached part up to this many tokens is computed by decode all the same."""


class Reservation(Message, frozen=True):
    """Where and what prefill ships."""

    fabric_address: Name
    """host:port of the decode worker's fabric listener."""
    num_cached_tokens: Count
    """Decode already has the KV of this many leading tokens."""


class PrefillRequest(Message, frozen=True):
    work: Work
    version: int = PROTOCOL_VERSION
    handoff: Handoff | None = None
    """None: the whole answer is the first token (max_tokens reached), nothing is shipped."""
    reservation: Reservation | None = None


class HoldRequest(Message, frozen=True):
    request_id: Name
    """As in the Work of the stream that is to stop, or to go on."""
    resume: bool = False
    version: int = PROTOCOL_VERSION


class ShipRequest(Message, frozen=True):
    """Ship the KV of a held request to where it was reserved, with its last token in the commit."""

    request_id: Name
    deadline_s: Seconds
    handoff: Handoff
    reservation: Reservation
    version: int = PROTOCOL_VERSION


# Frames


class TokenLogprob(Message, frozen=True):
    logprob: float
    top: list[tuple[int, float]] = []


class Reserved(Message, frozen=True, tag_field="t", tag="reserved"):
    reservation: Reservation


class Accepted(Message, frozen=True, tag_field="t", tag="accepted"):
    """Decode computes the prompt itself."""


class Busy(Message, frozen=True, tag_field="t", tag="busy"):
    """No room now. Nothing was allocated; try another worker or later."""

    message: str = ""


class Leaving(Message, frozen=True, tag_field="t", tag="leaving"):
    """This worker is being stopped: the stream goes on, but had better be moved."""


class Held(Message, frozen=True, tag_field="t", tag="held"):
    """The answer to HoldRequest. `num_output_tokens` are on the stream; no more come until it is resumed."""

    num_output_tokens: int


class Tokens(Message, frozen=True, tag_field="t", tag="tokens"):
    """Output tokens [index, index + len(token_ids)). Prefill and decode both send token 0: the reader keeps the
    first of each index."""

    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    """Empty, or one a token."""


class PromptLogprobs(Message, frozen=True, tag_field="t", tag="prompt_logprobs"):
    """Of prompt tokens [start, start + len(logprobs)), from the worker that computes the prompt, in order and before
    any output token of its own."""

    start: int
    logprobs: list[TokenLogprob]


class Stats(Message, frozen=True):
    """engine.messages.RequestStats, with the transfer's figures where there was one."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_step_s: float = 0.0
    decode_s: float = 0.0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    """At work on the bytes: gathering and sending, then from the commit to the acknowledgement."""
    transfer_wait_s: float = 0.0
    """From the first token to the acknowledgement: the part of the transfer that the next token waits for."""
    lane: str = ""


class Transferred(Message, frozen=True, tag_field="t", tag="transferred"):
    """Decode has acknowledged; prefill is done with the request."""

    stats: Stats


class Finish(Message, frozen=True, tag_field="t", tag="finish"):
    reason: Literal["stop", "length"]
    stats: Stats


class Failure(Message, frozen=True, tag_field="t", tag="failure"):
    message: str
    kind: Literal["invalid", "unavailable", "deadline", "transfer", "internal"]
    """invalid: the client's fault, the same everywhere. The others may succeed on another worker or attempt."""
    param: str | None = None


Frame = Reserved | Accepted | Busy | Leaving | Held | Tokens | PromptLogprobs | Transferred | Finish | Failure


# Prefill to decode, inside the commit of a transfer


class HandoffState(Message, frozen=True):
    """What decoding needs beyond KV. Sampling depends on (seed, choice, output index) only, penalties on the token
    ids, so the sampler's position and counts travel as `index` and the token itself."""

    index: int
    token_id: int
    logprobs: list[TokenLogprob] = []


# Worker description


class Fingerprint(Message, frozen=True):
    """What two workers must share so that one's KV means the same to the other."""

    wire_version: int
    model: str
    """Content hash of config.json and of the weights' names, shapes and sizes."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def difference(self, other: Fingerprint) -> str | None:
        """Name of the first field that differs, or None."""
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return None


class WorkerInfo(Message, frozen=True):
    role: Role
    incarnation: str
    """New for each process start."""
    state: Literal["loading", "ready", "draining", "failed"]
    model_name: str
    version: int = PROTOCOL_VERSION
    load_progress: float = 1.0
    """0 to 1 while state is "loading"."""
    message: str = ""
    fingerprint: Fingerprint | None = None
    """None until the model is loaded, and so for the fields below."""
    fabric_address: str = ""
    lane: str = ""
    block_size: int = 0
    num_blocks: int = 0
    capacity_tokens: int = 0
    """Longest prompt + output this worker can hold."""
    num_free_blocks: int = 0
    """Free or reclaimable."""
    num_requests: int = 0


# Coding


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def encode_frame(message: Frame) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def decode_generate(body: bytes) -> GenerateRequest:
    return _checked(_generate_decoder, body)


def decode_prefill(body: bytes) -> PrefillRequest:
    return _checked(_prefill_decoder, body)


def decode_hold(body: bytes) -> HoldRequest:
    return _checked(_hold_decoder, body)


def decode_ship(body: bytes) -> ShipRequest:
    return _checked(_ship_decoder, body)


def decode_worker_info(body: bytes) -> WorkerInfo:
    return _checked(_info_decoder, body)


def decode_handoff_state(body: bytes) -> HandoffState:
    return _checked(_state_decoder, body)


async def iter_frames(chunks: AsyncIterable[bytes]) -> AsyncIterator[Frame]:
    """Frames of a streamed answer, however its bytes were cut. Raises ProtocolError on bytes that are none."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield _checked(_frame_decoder, bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
    if buffer:
        raise ProtocolError("the stream ended inside a frame")


_T = TypeVar("_T")
_LENGTH = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
_generate_decoder = msgspec.msgpack.Decoder(GenerateRequest)
_prefill_decoder = msgspec.msgpack.Decoder(PrefillRequest)
_hold_decoder = msgspec.msgpack.Decoder(HoldRequest)
_ship_decoder = msgspec.msgpack.Decoder(ShipRequest)
_info_decoder = msgspec.msgpack.Decoder(WorkerInfo)
_state_decoder = msgspec.msgpack.Decoder(HandoffState)
_frame_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def _checked(decoder: msgspec.msgpack.Decoder[_T], body: bytes) -> _T:
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        message = decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(str(error)) from error
    version = getattr(message, "version", PROTOCOL_VERSION)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {version}, this process speaks {PROTOCOL_VERSION}")
    return message
