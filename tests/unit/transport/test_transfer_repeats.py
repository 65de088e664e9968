"""What was lost is said again, a bounded number of times; what was said twice counts once."""

from __future__ import annotations

from transport.checksum import digest
from transport.transfer import MAX_RESENDS, REPEAT_S, Grant, Receiver, ReceiverState, Sender, SenderState
from transport.transfer_events import (
    Acknowledge,
    AskAgain,
    CommitArrived,
    CommitAsked,
    Deliver,
    Ended,
    Fail,
    Opened,
    Refuse,
    Renewed,
    SayAlive,
    SegmentArrived,
    SegmentWritten,
    SendCommit,
    Shipped,
    TellAbort,
    Tick,
    Write,
)

KEY = b"k" * 32
DIGEST = digest([(0, 4, 11)])
COMMIT = CommitArrived(1, DIGEST, b"m")
SEGMENT = SegmentArrived(1, 0, 4, 11, intact=True)


def opened() -> Receiver:
    receiver = Receiver(Grant(b"h" * 16, 1, KEY, 0, 4, lease_s=50.0, sender="p"), deadline=50.0)
    receiver.handle(Opened(1, KEY, 0, 4, "p"), 0.0)
    return receiver


def committing(**options: float) -> Sender:
    sender = Sender(0, 4, attempt=1, deadline=60.0, **options)
    sender.handle(Shipped(0, 4, 11), 0.0)
    assert sender.handle(CommitAsked(b"m"), 0.0) == [SendCommit(DIGEST, b"m")]
    return sender


def test_a_commit_without_an_answer_is_repeated_at_its_pace() -> None:
    sender = committing()
    assert sender.handle(Tick(), REPEAT_S - 0.1) == []
    assert sender.handle(Tick(), REPEAT_S) == [SendCommit(DIGEST, b"m")]
    assert sender.handle(Tick(), REPEAT_S + 0.1) == []
    assert sender.handle(Tick(), 2 * REPEAT_S) == [SendCommit(DIGEST, b"m")]


def test_a_silent_receiver_is_given_up_long_before_the_deadline() -> None:
    sender = committing(silence_s=10.0, heard_at=0.0)
    sender.handle(Renewed(1), 8.0)
    assert sender.handle(Renewed(2), 9.0) == [], "another attempt's answer is no sign of life"
    assert Fail not in [type(i) for i in sender.handle(Tick(), 17.9)]
    assert [type(i) for i in sender.handle(Tick(), 18.0)] == [TellAbort, Fail]
    assert sender.state is SenderState.FAILED


def test_a_failed_receiver_says_so_again_to_a_sender_that_has_not_heard() -> None:
    receiver = opened()
    receiver.handle(Ended("decode gave up", tell=True), 1.0)
    assert receiver.handle(COMMIT, 2.0) == [TellAbort("decode gave up")]
    assert receiver.handle(Renewed(1), 2.0) == [TellAbort("decode gave up")]
    assert receiver.handle(Renewed(2), 2.0) == []
    assert isinstance(receiver.handle(Opened(1, KEY, 0, 4, "p"), 2.0)[0], Refuse)
    assert receiver.handle(SEGMENT, 2.0) == []
    assert receiver.state is ReceiverState.FAILED


def test_a_committed_receiver_acknowledges_each_repeated_commit_and_delivers_once() -> None:
    receiver = opened()
    receiver.handle(SEGMENT, 1.0)
    receiver.handle(SegmentWritten(0, True), 1.0)
    assert receiver.handle(COMMIT, 1.0) == [Acknowledge(), Deliver(b"m")]
    assert receiver.handle(COMMIT, 2.0) == [Acknowledge()]
    assert receiver.handle(Renewed(1), 2.0) == [SayAlive()]


def test_a_repeated_commit_while_segments_are_being_written_changes_nothing() -> None:
    receiver = opened()
    receiver.handle(SEGMENT, 1.0)
    assert receiver.handle(COMMIT, 1.0) == []
    assert receiver.handle(CommitArrived(1, DIGEST + 1, b"other"), 1.5) == [], "the first commit counts"
    assert receiver.handle(SegmentWritten(0, True), 2.0) == [Acknowledge(), Deliver(b"m")]


def test_a_hole_is_asked_for_again_only_after_a_pause_and_not_for_ever() -> None:
    receiver = opened()
    assert receiver.handle(COMMIT, 1.0) == [AskAgain(0, 4)]
    assert receiver.handle(COMMIT, 1.0 + REPEAT_S / 2) == []
    now = 1.0
    for _ in range(MAX_RESENDS - 1):
        now += REPEAT_S
        assert receiver.handle(COMMIT, now) == [AskAgain(0, 4)]
    assert [type(i) for i in receiver.handle(COMMIT, now + REPEAT_S)] == [TellAbort, Fail]


def test_a_repeated_segment_is_dropped_and_counted() -> None:
    receiver = opened()
    assert receiver.handle(SEGMENT, 1.0) == [Write(0)]
    assert receiver.handle(SEGMENT, 1.0) == []
    assert receiver.num_late == 1
    assert not receiver.ended


def test_an_open_by_the_wrong_one_is_refused_by_the_name_of_what_differs() -> None:
    receiver = Receiver(Grant(b"h" * 16, 2, KEY, 0, 4, lease_s=5.0, sender="p"), deadline=5.0)
    assert receiver.handle(Opened(1, KEY, 0, 4, "p"), 0.0) == [Refuse("the attempt is not that of the grant")]
    assert receiver.handle(Opened(2, b"", 0, 4, "p"), 0.0) == [Refuse("the key is not that of the grant")]
    assert receiver.state is ReceiverState.EXPECTED
    assert receiver.deadline == 5.0, "and does not keep the reservation alive"
    assert receiver.handle(Opened(2, KEY, 0, 4, "p"), 0.0) == []
    assert receiver.state is ReceiverState.RECEIVING
