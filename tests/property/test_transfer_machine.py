"""Both transfer machines over a network that loses, repeats, reorders, delays and damages, with aborts at any time."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transport import transfer_events as events
from transport.transfer import MAX_RESENDS, Grant, Receiver, ReceiverState, Sender, SenderState
from transport.transfer_events import Instruction

LEASE_S, DEADLINE_S = 10.0, 60.0
KEY, WRONG_KEY = b"k" * 32, b"x" * 32


@dataclass
class Owner:
    """What the owners of both ends were told, and the memory that the receiving one lent."""

    delivered: list[bytes] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    done: int = 0
    sender_failed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    """token -> checksum of the segment it was written from."""


class TransferOverABadNetwork(RuleBasedStateMachine):
    @initialize(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5), start=st.integers(0, 3))
    def begin(self, cuts: list[int], start: int) -> None:
        self.now = 0.0
        self.owner = Owner()
        self.start, self.end = start, start + sum(cuts)
        self.unshipped = []
        at = start
        for cut in cuts:
            self.unshipped.append((at, cut))
            at += cut
        self.receiver = Receiver(Grant(b"h" * 16, 1, KEY, self.start, self.end, LEASE_S, "p"), deadline=LEASE_S)
        self.sender = Sender(self.start, self.end, attempt=1, deadline=DEADLINE_S)
        self.to_receiver: list[events.ReceiverEvent] = [events.Opened(1, KEY, self.start, self.end, "p")]
        self.to_sender: list[events.SenderEvent] = []
        self.writing: list[int] = []
        self.ended_with: ReceiverState | None = None

    def checksum(self, start: int) -> int:
        return start * 1000 + 7

    def at_sender(self, event: events.SenderEvent) -> None:
        for instruction in self.sender.handle(event, self.now):
            match instruction:
                case events.SendSegment(start, num_tokens):
                    self.to_receiver.append(
                        events.SegmentArrived(1, start, num_tokens, self.checksum(start), intact=True)
                    )
                case events.SendCommit(digest, meta):
                    self.to_receiver.append(events.CommitArrived(1, digest, meta))
                case events.TellAbort(reason):
                    self.to_receiver.append(events.Ended(reason, tell=False))
                case events.Done():
                    self.owner.done += 1
                case events.Fail():
                    self.owner.sender_failed += 1
                case _:
                    raise AssertionError(f"no instruction for a sender: {instruction}")

    def at_receiver(self, event: events.ReceiverEvent) -> None:
        ended_before = self.receiver.ended
        instructions: list[Instruction] = self.receiver.handle(event, self.now)
        for instruction in instructions:
            match instruction:
                case events.Write(start):
                    assert not ended_before, "nothing is written to a block after it left the handoff"
                    self.writing.append(start)
                case events.AskAgain(start, num_tokens):
                    assert self.start <= start < start + num_tokens <= self.end
                    self.to_sender.append(events.ResendAsked(1, start, num_tokens))
                case events.Acknowledge():
                    self.to_sender.append(events.Acked(1))
                case events.TellAbort(reason):
                    self.to_sender.append(events.Ended(reason, tell=False))
                case events.SayAlive():
                    self.to_sender.append(events.Renewed(1))
                case events.Refuse():
                    assert isinstance(event, events.Opened)
                case events.Deliver(meta):
                    self.owner.delivered.append(meta)
                case events.Fail(reason):
                    self.owner.failed.append(reason)
                case _:
                    raise AssertionError(f"no instruction for a receiver: {instruction}")

    @rule()
    def ship(self) -> None:
        if self.unshipped and not self.sender.ended:
            start, num_tokens = self.unshipped.pop(0)
            self.at_sender(events.Shipped(start, num_tokens, self.checksum(start)))
            self.to_receiver.append(events.SegmentArrived(1, start, num_tokens, self.checksum(start), intact=True))

    @precondition(lambda self: not self.unshipped and self.sender.state is SenderState.SHIPPING)
    @rule()
    def commit(self) -> None:
        self.at_sender(events.CommitAsked(b"meta"))

    @precondition(lambda self: bool(self.to_receiver))
    @rule(data=st.data(), how=st.sampled_from(["deliver"] * 6 + ["repeat", "lose", "damage"]))
    def network_to_receiver(self, data: st.DataObject, how: str) -> None:
        index = data.draw(st.integers(0, len(self.to_receiver) - 1))
        event = self.to_receiver[index] if how == "repeat" else self.to_receiver.pop(index)
        if how == "damage" and isinstance(event, events.SegmentArrived):
            event = events.SegmentArrived(1, event.start, event.num_tokens, event.checksum, intact=False)
        if how != "lose":
            self.at_receiver(event)

    @precondition(lambda self: bool(self.to_sender))
    @rule(data=st.data(), how=st.sampled_from(["deliver"] * 6 + ["repeat", "lose"]))
    def network_to_sender(self, data: st.DataObject, how: str) -> None:
        index = data.draw(st.integers(0, len(self.to_sender) - 1))
        event = self.to_sender[index] if how == "repeat" else self.to_sender.pop(index)
        if how != "lose":
            self.at_sender(event)

    @precondition(lambda self: bool(self.writing))
    @rule(data=st.data(), written=st.sampled_from([True] * 9 + [False]))
    def engine_writes(self, data: st.DataObject, written: bool) -> None:
        start = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        if written and not self.receiver.ended:
            num_tokens, check = self.receiver.segments[start]
            self.owner.blocks |= dict.fromkeys(range(start, start + num_tokens), check)
        self.at_receiver(events.SegmentWritten(start, written))

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.at_receiver(events.Tick())
        self.at_sender(events.Tick())

    @rule()
    def renew(self) -> None:
        if not self.sender.ended:
            self.to_receiver.append(events.Renewed(1))

    @rule(who=st.sampled_from(["sender", "receiver"]), tell=st.booleans())
    def give_up_or_restart(self, who: str, tell: bool) -> None:
        ended = events.Ended("gone", tell=tell)
        self.at_sender(ended) if who == "sender" else self.at_receiver(ended)

    @rule(attempt=st.sampled_from([0, 2]), what=st.sampled_from(["open", "segment", "commit"]))
    def an_earlier_or_later_attempt_speaks(self, attempt: int, what: str) -> None:
        before = (self.receiver.state, dict(self.receiver.segments), len(self.writing))
        event: events.ReceiverEvent = events.CommitArrived(attempt, 1, b"other")
        if what == "open":
            event = events.Opened(attempt, KEY, self.start, self.end, "p")
        elif what == "segment":
            event = events.SegmentArrived(attempt, self.start, 1, 5, intact=True)
        self.at_receiver(event)
        assert before == (self.receiver.state, dict(self.receiver.segments), len(self.writing))

    @rule()
    def a_stranger_without_the_key_opens(self) -> None:
        before = self.receiver.state
        self.at_receiver(events.Opened(1, WRONG_KEY, self.start, self.end, "p"))
        assert self.receiver.state is before

    @invariant()
    def every_end_is_told_once(self) -> None:
        assert len(self.owner.delivered) + len(self.owner.failed) == self.receiver.ended
        assert self.owner.done + self.owner.sender_failed == self.sender.ended

    @invariant()
    def the_first_end_wins(self) -> None:
        if self.receiver.ended:
            self.ended_with = self.ended_with or self.receiver.state
            assert self.receiver.state is self.ended_with

    @invariant()
    def a_delivery_is_complete(self) -> None:
        if self.owner.delivered:
            assert self.owner.delivered == [b"meta"]
            assert set(self.owner.blocks) == set(range(self.start, self.end))
            for start, (num_tokens, check) in self.receiver.segments.items():
                assert check == self.checksum(start)
                assert all(self.owner.blocks[token] == check for token in range(start, start + num_tokens))

    @invariant()
    def an_acknowledgement_is_proof(self) -> None:
        if self.owner.done:
            assert self.receiver.state is ReceiverState.COMMITTED

    @invariant()
    def resends_are_bounded(self) -> None:
        assert all(count <= MAX_RESENDS + 1 for count in self.receiver._asked.values())

    def teardown(self) -> None:
        """Whatever was lost, time ends both."""
        if hasattr(self, "receiver"):
            self.now += DEADLINE_S + LEASE_S
            self.at_receiver(events.Tick())
            self.at_sender(events.Tick())
            assert self.receiver.ended
            assert self.sender.ended
            self.every_end_is_told_once()


TransferOverABadNetwork.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestTransferOverABadNetwork = TransferOverABadNetwork.TestCase
