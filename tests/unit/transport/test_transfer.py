"""Single paths through the transfer machines, step by step."""

from __future__ import annotations

from transport.checksum import digest
from transport.transfer import MAX_RESENDS, Grant, Receiver, ReceiverState, Sender
from transport.transfer_events import (
    Acked,
    Acknowledge,
    AskAgain,
    CommitArrived,
    CommitAsked,
    Deliver,
    Done,
    Ended,
    Fail,
    Opened,
    Refuse,
    Renewed,
    ResendAsked,
    SayAlive,
    SegmentArrived,
    SegmentWritten,
    SendCommit,
    SendSegment,
    Shipped,
    TellAbort,
    Tick,
    Write,
)

KEY = b"k" * 32
DIGEST = digest([(0, 4, 11), (4, 4, 12)])


def opened() -> Receiver:
    receiver = Receiver(Grant(b"h" * 16, 1, KEY, 0, 8, lease_s=5.0, sender="p"), deadline=5.0)
    assert receiver.handle(Opened(1, KEY, 0, 8, "p"), 0.0) == []
    assert receiver.state is ReceiverState.RECEIVING
    return receiver


def segment(start: int, *, intact: bool = True) -> SegmentArrived:
    return SegmentArrived(1, start, 4, 11 + start // 4, intact)


def test_a_transfer_without_faults_is_delivered_and_acknowledged_once() -> None:
    receiver = opened()
    for start in (0, 4):
        assert receiver.handle(segment(start), 1.0) == [Write(start)]
        assert receiver.handle(SegmentWritten(start, True), 1.0) == []
    assert receiver.handle(CommitArrived(1, DIGEST, b"m"), 1.0) == [Acknowledge(), Deliver(b"m")]
    assert receiver.handle(CommitArrived(1, DIGEST, b"m"), 1.0) == [Acknowledge()], "the first one may be lost"
    assert receiver.handle(Ended("late abort", tell=False), 2.0) == []
    assert receiver.state is ReceiverState.COMMITTED


def test_a_commit_waits_for_the_last_write() -> None:
    receiver = opened()
    for start in (0, 4):
        receiver.handle(segment(start), 1.0)
    assert receiver.handle(CommitArrived(1, DIGEST, b"m"), 1.0) == []
    assert receiver.handle(SegmentWritten(4, True), 1.0) == []
    assert receiver.handle(SegmentWritten(0, True), 1.0) == [Acknowledge(), Deliver(b"m")]


def test_a_damaged_segment_is_never_written_and_asked_for_a_bounded_number_of_times() -> None:
    receiver = opened()
    for _ in range(MAX_RESENDS):
        assert receiver.handle(segment(0, intact=False), 1.0) == [AskAgain(0, 4)]
    told, failed = receiver.handle(segment(0, intact=False), 1.0)
    assert isinstance(told, TellAbort)
    assert isinstance(failed, Fail)


def test_a_lost_segment_shows_as_a_hole_at_the_commit() -> None:
    receiver = opened()
    receiver.handle(segment(4), 1.0)
    receiver.handle(SegmentWritten(4, True), 1.0)
    assert receiver.handle(CommitArrived(1, DIGEST, b"m"), 1.0) == [AskAgain(0, 4)]
    assert receiver.handle(segment(0), 1.0) == [Write(0)]
    assert receiver.handle(SegmentWritten(0, True), 1.0) == [Acknowledge(), Deliver(b"m")]


def test_other_bytes_under_the_same_commit_are_refused() -> None:
    receiver = opened()
    for start in (0, 4):
        receiver.handle(segment(start), 1.0)
        receiver.handle(SegmentWritten(start, True), 1.0)
    told, failed = receiver.handle(CommitArrived(1, DIGEST + 1, b"m"), 1.0)
    assert isinstance(told, TellAbort)
    assert isinstance(failed, Fail)


def test_a_lease_is_moved_on_by_whatever_is_heard_and_ends_in_silence() -> None:
    receiver = opened()
    assert receiver.handle(Renewed(1), 4.0) == [SayAlive()]
    assert receiver.handle(Tick(), 8.9) == []
    assert [type(i) for i in receiver.handle(Tick(), 9.0)] == [TellAbort, Fail]


def test_a_segment_outside_the_grant_or_over_another_ends_the_transfer() -> None:
    for start, num_tokens in ((6, 4), (0, 9), (0, 0)):
        receiver = opened()
        assert receiver.handle(SegmentArrived(1, start, num_tokens, 1, True), 1.0)[-1].__class__ is Fail
    receiver = opened()
    receiver.handle(segment(0), 1.0)
    assert receiver.handle(SegmentArrived(1, 2, 4, 1, True), 1.0)[-1].__class__ is Fail


def test_nothing_counts_before_the_key_was_shown() -> None:
    receiver = Receiver(Grant(b"h" * 16, 1, KEY, 0, 8, lease_s=5.0, sender="p"), deadline=5.0)
    assert receiver.handle(Opened(1, b"wrong" * 6, 0, 8, "p"), 0.0) == [Refuse("the key is not that of the grant")]
    assert receiver.handle(segment(0), 0.0) == []
    assert receiver.state is ReceiverState.EXPECTED
    assert receiver.num_late == 2


def test_a_sender_resends_the_same_cuts_and_believes_only_an_acknowledgement() -> None:
    sender = Sender(0, 8, attempt=1, deadline=60.0)
    for start in (0, 4):
        sender.handle(Shipped(start, 4, 11 + start // 4), 0.0)
    assert sender.handle(CommitAsked(b"m"), 1.0) == [SendCommit(DIGEST, b"m")]
    assert sender.handle(ResendAsked(1, 2, 1), 1.0) == [SendSegment(0, 4)]
    assert sender.handle(Acked(2), 1.0) == [], "of another attempt"
    assert sender.handle(Acked(1), 1.0) == [Done()]
    assert sender.handle(Ended("too late", tell=True), 1.0) == []


def test_a_sender_gives_up_at_its_deadline_and_says_so() -> None:
    sender = Sender(0, 8, attempt=1, deadline=60.0)
    assert sender.handle(Tick(), 59.9) == []
    assert [type(i) for i in sender.handle(Tick(), 60.0)] == [TellAbort, Fail]
