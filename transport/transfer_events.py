"""What may happen to a transfer, and what its machines want done. Pure data; transport.transfer is the meaning.

Events go in, named for what has happened; instructions come out, named for what is to be done.
"""

from __future__ import annotations

from dataclasses import dataclass

# Events


@dataclass(frozen=True, slots=True)
class Opened:
    attempt: int
    key: bytes
    start: int
    end: int
    sender: str
    """Incarnation that greeted on the connection it came by."""


@dataclass(frozen=True, slots=True)
class SegmentArrived:
    attempt: int
    start: int
    num_tokens: int
    checksum: int
    intact: bool


@dataclass(frozen=True, slots=True)
class SegmentWritten:
    start: int
    written: bool


@dataclass(frozen=True, slots=True)
class CommitArrived:
    attempt: int
    digest: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Renewed:
    """The sender still works on it (at the receiver), or the receiver is still there (at the sender)."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer aborted, its connection is lost, or this side gives up. `tell`: the peer does not know yet."""

    reason: str
    tell: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Shipped:
    start: int
    num_tokens: int
    checksum: int


@dataclass(frozen=True, slots=True)
class CommitAsked:
    meta: bytes


@dataclass(frozen=True, slots=True)
class ResendAsked:
    attempt: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Acked:
    attempt: int


# Instructions


@dataclass(frozen=True, slots=True)
class Write:
    """Copy the segment that starts here from staging into blocks, then report SegmentWritten."""

    start: int


@dataclass(frozen=True, slots=True)
class AskAgain:
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    pass


@dataclass(frozen=True, slots=True)
class SayAlive:
    pass


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand `meta` to the owner: the transfer is complete. At most once, and never beside Fail."""

    meta: bytes


@dataclass(frozen=True, slots=True)
class TellAbort:
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the one who asked to open, who may not be the one whose transfer this is."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the owner. At most once, and never beside Deliver or Done."""

    reason: str


@dataclass(frozen=True, slots=True)
class SendSegment:
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    digest: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Done:
    pass


ReceiverEvent = Opened | SegmentArrived | SegmentWritten | CommitArrived | Renewed | Ended | Tick
SenderEvent = Shipped | CommitAsked | ResendAsked | Acked | Renewed | Ended | Tick
Instruction = (
    Write | AskAgain | Acknowledge | SayAlive | Deliver | TellAbort | Refuse | Fail | SendSegment | SendCommit | Done
)
