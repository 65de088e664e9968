"""The two state machines of a transfer. Pure: events and `now` go in, instructions come out, nothing else happens.

Receiver                                           Sender
    EXPECTED   granted, nobody has come yet            SHIPPING    opened; segments as KV becomes readable
       | Opened: attempt, key and range match             | CommitAsked: every token was shipped
    RECEIVING  segments arrive, are verified,          COMMITTING  the commit is out
       |       are written                                | Acked
       | CommitArrived                                 ACKED       the only proof of delivery
    CLOSING    waits for writes and resends
       | every token verified and written, digest right
    COMMITTED  acknowledged, delivered once

    any state before the last -> FAILED                any state before the last -> FAILED
      lease over, cancelled, peer aborted or lost,       deadline, aborted, peer aborted or lost,
      a segment bad too often, a wrong digest            resent too often, receiver silent

The first terminal state wins: whatever comes later changes nothing and is counted in `num_late`. What was lost is
said again: the sender repeats its commit every REPEAT_S, a COMMITTED receiver acknowledges each, a FAILED one says
again that it has failed.

Segments may be lost, repeated, reordered or damaged. A repeated one is dropped. A damaged one is asked for again at
once, a lost one when the commit shows the hole; each range at most MAX_RESENDS times.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from transport.checksum import digest
from transport.transfer_events import (
    Acknowledge,
    AskAgain,
    CommitArrived,
    CommitAsked,
    Deliver,
    Done,
    Ended,
    Fail,
    Instruction,
    Opened,
    ReceiverEvent,
    Refuse,
    Renewed,
    ResendAsked,
    SayAlive,
    SegmentArrived,
    SegmentWritten,
    SendCommit,
    SenderEvent,
    SendSegment,
    Shipped,
    TellAbort,
    Tick,
    Write,
)

MAX_RESENDS = 3
REPEAT_S = 1.0
"""A commit is repeated, and a hole asked for again, after this long without an answer."""


class ReceiverState(enum.Enum):
    EXPECTED = "expected"
    RECEIVING = "receiving"
    CLOSING = "closing"
    COMMITTED = "committed"
    FAILED = "failed"


class SenderState(enum.Enum):
    SHIPPING = "shipping"
    COMMITTING = "committing"
    ACKED = "acked"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TransferStats:
    num_bytes: int
    seconds: float
    """At the sender: at work on segments, then from the commit to the acknowledgement; not the waits for chunks that
    were still being computed. At the receiver: from the opening to the end."""
    num_segments: int
    num_resent: int
    lane: str


@dataclass(frozen=True, slots=True)
class Grant:
    """What the receiver has agreed to take in. Tokens [start, end)."""

    handoff_id: bytes
    attempt: int
    key: bytes
    start: int
    end: int
    lease_s: float
    sender: str
    """Incarnation of the only process that may ship it."""


@dataclass(slots=True)
class Receiver:
    """One attempt's reservation, from `expect` to its end."""

    grant: Grant
    deadline: float
    """The lease: moved on by whatever the sender lets us hear."""
    since: float = 0.0
    """When it came into its state."""
    state: ReceiverState = ReceiverState.EXPECTED
    num_late: int = 0
    num_resends: int = 0
    num_bytes: int = 0
    segments: dict[int, tuple[int, int]] = field(default_factory=dict)
    """start -> (num_tokens, checksum) of those that were verified."""
    written: set[int] = field(default_factory=set)
    _asked: dict[int, int] = field(default_factory=dict)
    _asked_at: dict[int, float] = field(default_factory=dict)
    _commit: CommitArrived | None = None
    _reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state in (ReceiverState.COMMITTED, ReceiverState.FAILED)

    def handle(self, event: ReceiverEvent, now: float) -> list[Instruction]:
        before = self.state
        instructions = self._handle(event, now)
        if self.state is not before:
            self.since = now
        return instructions

    def _handle(self, event: ReceiverEvent, now: float) -> list[Instruction]:
        if self.ended:
            return self._late(event)
        match event:
            case Ended():
                return self._fail(event.reason, tell=event.tell)
            case Tick():
                expired = now >= self.deadline
                return self._fail("nothing was heard from prefill within the lease", tell=True) if expired else []
            case SegmentWritten():
                return self._on_written(event, now)
        if isinstance(event, Opened):
            return self._on_open(event, now)
        if event.attempt != self.grant.attempt:
            self.num_late += 1
            return []
        if self.state is ReceiverState.EXPECTED:  # nothing counts before the key was shown
            self.num_late += 1
            return []
        self.deadline = now + self.grant.lease_s
        match event:
            case SegmentArrived():
                return self._on_segment(event, now)
            case CommitArrived():
                self.state = ReceiverState.CLOSING
                self._commit = self._commit or event
                return self._close(now)
            case Renewed():
                return [SayAlive()]
        raise AssertionError(f"no receiver event: {event}")

    def _late(self, event: ReceiverEvent) -> list[Instruction]:
        if isinstance(event, Ended | Tick | SegmentWritten):
            return []
        self.num_late += 1
        if isinstance(event, Opened):
            return [Refuse(f"the transfer has ended here: {self._reason or self.state.value}")]
        if event.attempt != self.grant.attempt or not isinstance(event, CommitArrived | Renewed):
            return []
        if self.state is ReceiverState.FAILED:
            return [TellAbort(self._reason)]
        return [Acknowledge()] if isinstance(event, CommitArrived) else [SayAlive()]

    def _on_open(self, event: Opened, now: float) -> list[Instruction]:
        wrong = "attempt" if event.attempt != self.grant.attempt else ""
        wrong = wrong or ("sender" if event.sender != self.grant.sender else "")
        wrong = wrong or ("" if hmac.compare_digest(event.key, self.grant.key) else "key")
        if wrong:
            self.num_late += 1  # a stranger's, or an earlier attempt's: it must not end what it does not own
            return [Refuse(f"the {wrong} is not that of the grant")]
        if (event.start, event.end) != (self.grant.start, self.grant.end):
            return self._fail(f"prefill would ship tokens {event.start} to {event.end}", tell=True)
        self.deadline = now + self.grant.lease_s
        if self.state is ReceiverState.EXPECTED:
            self.state = ReceiverState.RECEIVING
        return []

    def _on_segment(self, event: SegmentArrived, now: float) -> list[Instruction]:
        end = event.start + event.num_tokens
        if event.num_tokens < 1 or event.start < self.grant.start or end > self.grant.end:
            return self._fail(f"a segment of tokens {event.start} to {end} lies outside the grant", tell=True)
        if event.start in self.segments:
            self.num_late += 1
            return []
        if not event.intact:
            return self._ask(event.start, event.num_tokens, now)
        if any(event.start < at + self.segments[at][0] and at < end for at in self.segments):
            return self._fail(f"a segment of tokens {event.start} to {end} overlaps another", tell=True)
        self.segments[event.start] = (event.num_tokens, event.checksum)
        return [Write(event.start)]

    def _on_written(self, event: SegmentWritten, now: float) -> list[Instruction]:
        if not event.written:
            return self._fail("the request has ended", tell=True)
        self.written.add(event.start)
        return self._close(now) if self.state is ReceiverState.CLOSING else []

    def _ask(self, start: int, num_tokens: int, now: float) -> list[Instruction]:
        self._asked[start] = self._asked.get(start, 0) + 1
        self._asked_at[start] = now
        if self._asked[start] > MAX_RESENDS:
            return self._fail(f"tokens {start} to {start + num_tokens} were damaged or lost too often", tell=True)
        self.num_resends += 1
        return [AskAgain(start, num_tokens)]

    def _close(self, now: float) -> list[Instruction]:
        """After the commit: ask for what is missing, wait for what is being written, or complete."""
        assert self._commit is not None
        at = self.grant.start
        while at in self.segments:
            at += self.segments[at][0]
        if at < self.grant.end:
            hole_end = min((start for start in self.segments if start > at), default=self.grant.end)
            asked_at = self._asked_at.get(at)
            waiting = asked_at is not None and now < asked_at + REPEAT_S
            return [] if waiting else self._ask(at, hole_end - at, now)
        if len(self.written) < len(self.segments):
            return []
        if digest((s, n, c) for s, (n, c) in self.segments.items()) != self._commit.digest:
            return self._fail("the commit's digest is not that of the segments", tell=True)
        self.state = ReceiverState.COMMITTED
        return [Acknowledge(), Deliver(self._commit.meta)]

    def _fail(self, reason: str, *, tell: bool) -> list[Instruction]:
        self.state = ReceiverState.FAILED
        self._reason = reason
        return [*([TellAbort(reason)] if tell else []), Fail(reason)]


@dataclass(slots=True)
class Sender:
    """One attempt's shipment, from `open` to its end."""

    start: int
    end: int
    attempt: int
    deadline: float
    silence_s: float = float("inf")
    """A receiver not heard for this long is taken for dead, whatever the fabric says."""
    heard_at: float = 0.0
    since: float = 0.0
    """When it came into its state."""
    state: SenderState = SenderState.SHIPPING
    num_late: int = 0
    num_resent: int = 0
    segments: dict[int, tuple[int, int]] = field(default_factory=dict)
    _resent: dict[int, int] = field(default_factory=dict)
    _commit: SendCommit | None = None
    _said_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.state in (SenderState.ACKED, SenderState.FAILED)

    def handle(self, event: SenderEvent, now: float) -> list[Instruction]:
        before = self.state
        instructions = self._handle(event, now)
        if self.state is not before:
            self.since = now
        return instructions

    def _handle(self, event: SenderEvent, now: float) -> list[Instruction]:
        if self.ended:
            self.num_late += not isinstance(event, Tick | Ended)
            return []
        match event:
            case Ended():
                return self._fail(event.reason, tell=event.tell)
            case Tick():
                return self._on_tick(now)
            case Shipped():
                self.segments[event.start] = (event.num_tokens, event.checksum)
                return []
            case CommitAsked():
                shipped = sum(num_tokens for num_tokens, _ in self.segments.values())
                assert shipped == self.end - self.start, "a commit comes after the last segment"
                self.state = SenderState.COMMITTING
                self._said_at = now
                self._commit = SendCommit(digest((s, n, c) for s, (n, c) in self.segments.items()), event.meta)
                return [self._commit]
        if event.attempt != self.attempt:
            self.num_late += 1
            return []
        self.heard_at = now
        if isinstance(event, Renewed):
            return []
        if isinstance(event, ResendAsked):
            return self._on_resend(event)
        if self.state is not SenderState.COMMITTING:
            return self._fail("an acknowledgement before the commit", tell=True)
        self.state = SenderState.ACKED
        return [Done()]

    def _on_tick(self, now: float) -> list[Instruction]:
        if now >= self.deadline:
            return self._fail("no acknowledgement before the deadline", tell=True)
        if now >= self.heard_at + self.silence_s:
            return self._fail(f"decode was silent for {self.silence_s:g} s", tell=True)
        if self._commit is None or now < self._said_at + REPEAT_S:
            return []
        self._said_at = now
        return [self._commit]

    def _on_resend(self, event: ResendAsked) -> list[Instruction]:
        """Whole segments that overlap the range: the receiver's digest is over the same cuts as ours."""
        end = event.start + event.num_tokens
        again: list[Instruction] = []
        for start, (num_tokens, _) in sorted(self.segments.items()):
            if start < end and event.start < start + num_tokens:
                self._resent[start] = self._resent.get(start, 0) + 1
                if self._resent[start] > MAX_RESENDS:
                    return self._fail(f"tokens {start} to {start + num_tokens} were asked for too often", tell=True)
                again.append(SendSegment(start, num_tokens))
        self.num_resent += len(again)
        return again

    def _fail(self, reason: str, *, tell: bool) -> list[Instruction]:
        self.state = SenderState.FAILED
        return [*([TellAbort(reason)] if tell else []), Fail(reason)]


def by_state(
    machines: Iterable[Receiver | Sender], states: type[ReceiverState] | type[SenderState], now: float
) -> dict[str, dict[str, float]]:
    """state -> how many machines are in it, and for how long the one that has been there longest."""
    found: dict[str, dict[str, float]] = {state.value: {"count": 0, "oldest_s": 0.0} for state in states}
    for machine in machines:
        entry = found[machine.state.value]
        entry["count"] += 1
        entry["oldest_s"] = max(entry["oldest_s"], now - machine.since)
    return found
