"""Both machines end, and end well where nothing was lost: liveness beside the safety of test_transfer_machine.

The world here is all that the shells are in production: messages in flight, writes under way, a clock.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transport import transfer_events as events
from transport.transfer import MAX_RESENDS, Grant, Receiver, ReceiverState, Sender, SenderState

KEY = b"k" * 32
LEASE_S = 5.0
SILENCE_S = 10.0
DEADLINE_S = 60.0
ATTEMPT = 7
META = b"first token"


def content(start: int, num_tokens: int) -> int:
    """The checksum of what the sender has for these tokens."""
    return start * 1000 + num_tokens


class TransferEnds(RuleBasedStateMachine):
    @initialize(start=st.integers(0, 5), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
    def begin(self, start: int, sizes: list[int]) -> None:
        self.now = 100.0
        self.start, self.end = start, start + sum(sizes)
        self.unshipped = []
        for size in sizes:
            self.unshipped.append((start, size))
            start += size
        self.receiver = Receiver(Grant(b"h" * 16, ATTEMPT, KEY, self.start, self.end, LEASE_S, "p"), self.now + LEASE_S)
        self.sender = Sender(
            self.start, self.end, ATTEMPT, self.now + DEADLINE_S, silence_s=SILENCE_S, heard_at=self.now
        )
        self.to_receiver: list[Any] = [events.Opened(ATTEMPT, KEY, self.start, self.end, "p")]
        self.to_sender: list[Any] = []
        self.writing: set[int] = set()
        self.blocks: dict[int, int] = {}
        """What has been written: token -> checksum of the segment that brought it."""
        self.outcomes: list[str] = []
        self.sender_outcomes: list[str] = []
        self.asked: dict[int, int] = {}
        self.connected = True
        self.lossless = True
        self.waited_s = 0.0
        """Time that passed after the commit: what is late by more than a few repeats counts as lost."""

    # What the shells do

    def receive(self, event: events.ReceiverEvent) -> None:
        was_ended, before = self.receiver.ended, self.receiver.state
        for instruction in self.receiver.handle(event, self.now):
            match instruction:
                case events.Write():
                    assert not was_ended, "nothing is written once the handoff has ended"
                    assert instruction.start not in self.writing, "a range is written once at a time"
                    self.writing.add(instruction.start)
                case events.AskAgain():
                    assert not was_ended
                    self.asked[instruction.start] = self.asked.get(instruction.start, 0) + 1
                    assert self.asked[instruction.start] <= MAX_RESENDS
                    self.say(events.ResendAsked(ATTEMPT, instruction.start, instruction.num_tokens))
                case events.Acknowledge():
                    assert self.receiver.state is ReceiverState.COMMITTED
                    self.say(events.Acked(ATTEMPT))
                case events.SayAlive():
                    self.say(events.Renewed(ATTEMPT))
                case events.TellAbort():
                    self.say(events.Ended(instruction.reason, tell=False))
                case events.Refuse():
                    assert isinstance(event, events.Opened)
                case events.Deliver():
                    self.outcomes.append("committed")
                    self.check_complete(instruction.meta)
                case events.Fail():
                    self.outcomes.append("failed")
                case _:
                    raise AssertionError(instruction)
        if was_ended:
            assert self.receiver.state is before, "the first terminal state wins"

    def send(self, event: events.SenderEvent) -> None:
        was_ended, before = self.sender.ended, self.sender.state
        for instruction in self.sender.handle(event, self.now):
            assert not was_ended
            match instruction:
                case events.SendSegment():
                    self.put_segment(instruction.start, instruction.num_tokens)
                case events.SendCommit():
                    self.hand_over(events.CommitArrived(ATTEMPT, instruction.digest, instruction.meta))
                case events.TellAbort():
                    self.hand_over(events.Ended(instruction.reason, tell=False))
                case events.Fail():
                    self.sender_outcomes.append("failed")
                case events.Done():
                    assert self.outcomes == ["committed"], "an acknowledgement is a proof"
                    self.sender_outcomes.append("acked")
                case _:
                    raise AssertionError(instruction)
        if was_ended:
            assert self.sender.state is before

    def say(self, event: Any) -> None:
        if self.connected:
            self.to_sender.append(event)

    def hand_over(self, event: Any) -> None:
        if self.connected:
            self.to_receiver.append(event)

    def put_segment(self, start: int, num_tokens: int) -> None:
        self.hand_over(events.SegmentArrived(ATTEMPT, start, num_tokens, content(start, num_tokens), intact=True))

    def check_complete(self, meta: bytes) -> None:
        assert meta == META
        assert not self.writing, "nothing is still being written"
        assert sorted(self.blocks) == list(range(self.start, self.end)), "every token was written"
        for start, (num_tokens, checksum) in self.sender.segments.items():
            assert checksum == content(start, num_tokens)
            assert {self.blocks[token] for token in range(start, start + num_tokens)} == {checksum}

    # What may happen

    @precondition(lambda self: self.unshipped and not self.sender.ended)
    @rule()
    def ship(self) -> None:
        start, num_tokens = self.unshipped.pop(0)
        self.send(events.Shipped(start, num_tokens, content(start, num_tokens)))
        self.put_segment(start, num_tokens)

    @precondition(lambda self: not self.unshipped and self.sender.state is SenderState.SHIPPING)
    @rule()
    def commit(self) -> None:
        self.send(events.CommitAsked(META))

    @precondition(lambda self: self.to_receiver)
    @rule(data=st.data())
    def deliver_to_receiver(self, data: st.DataObject) -> None:
        self.receive(self.to_receiver.pop(data.draw(st.integers(0, len(self.to_receiver) - 1))))

    @precondition(lambda self: self.to_receiver)
    @rule()
    def deliver_in_order(self) -> None:
        self.receive(self.to_receiver.pop(0))

    @precondition(lambda self: self.to_sender)
    @rule(data=st.data())
    def deliver_to_sender(self, data: st.DataObject) -> None:
        self.send(self.to_sender.pop(data.draw(st.integers(0, len(self.to_sender) - 1))))

    @precondition(lambda self: self.to_receiver)
    @rule(data=st.data(), how=st.sampled_from(["lose", "repeat", "damage"]))
    def disturb(self, data: st.DataObject, how: str) -> None:
        at = data.draw(st.integers(0, len(self.to_receiver) - 1))
        event = self.to_receiver[at]
        self.lossless &= how == "repeat"
        if how == "lose":
            self.to_receiver.pop(at)
        elif how == "repeat":
            self.to_receiver.append(event)
        elif isinstance(event, events.SegmentArrived):
            self.to_receiver[at] = events.SegmentArrived(ATTEMPT, event.start, event.num_tokens, 1, intact=False)

    @precondition(lambda self: self.to_sender)
    @rule(data=st.data(), repeat=st.booleans())
    def disturb_answers(self, data: st.DataObject, repeat: bool) -> None:
        at = data.draw(st.integers(0, len(self.to_sender) - 1))
        self.lossless &= repeat
        if repeat:
            self.to_sender.append(self.to_sender[at])
        else:
            self.to_sender.pop(at)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), written=st.sampled_from([True, True, True, False]))
    def finish_write(self, data: st.DataObject, written: bool) -> None:
        start = data.draw(st.sampled_from(sorted(self.writing)))
        self.complete(start, written)

    def complete(self, start: int, written: bool) -> None:
        self.writing.discard(start)
        if written and not self.receiver.ended:
            num_tokens, checksum = self.receiver.segments[start]
            for token in range(start, start + num_tokens):
                assert token not in self.blocks, "a block is written once"
                self.blocks[token] = checksum
        self.receive(events.SegmentWritten(start, written))

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.5, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.receiver.state is ReceiverState.CLOSING:
            self.waited_s += seconds
        self.receive(events.Tick())
        self.send(events.Tick())

    @rule()
    def renew(self) -> None:
        if not self.sender.ended:
            self.hand_over(events.Renewed(ATTEMPT))

    @rule(chance=st.integers(0, 9), side=st.sampled_from(["sender", "receiver", "lost", "sender restarts"]))
    def end(self, chance: int, side: str) -> None:
        if chance:
            return
        if side == "sender":
            self.send(events.Ended("prefill gave up", tell=True))
        elif side == "receiver":
            self.receive(events.Ended("decode gave up", tell=True))
        else:
            self.connected = False
            self.to_sender.clear()
            self.to_receiver.clear()
            self.receive(events.Ended("the connection was lost", tell=False))
            self.send(events.Ended("the connection was lost", tell=False))

    @rule(what=st.integers(0, 5))
    def stranger(self, what: int) -> None:
        """Another attempt's messages, a wrong key: counted, and nothing more."""
        before = (self.receiver.state, dict(self.receiver.segments), set(self.receiver.written), self.receiver.deadline)
        late = self.receiver.num_late
        self.receive(
            [
                events.Opened(ATTEMPT, b"wrong", self.start, self.end, "p"),
                events.Opened(ATTEMPT - 1, KEY, self.start, self.end, "p"),
                events.SegmentArrived(ATTEMPT - 1, self.start, 1, 1, intact=True),
                events.CommitArrived(ATTEMPT - 1, 1, b"stale"),
                events.Renewed(ATTEMPT + 1),
                events.SegmentArrived(ATTEMPT + 1, self.start, 1, 1, intact=False),
            ][what]
        )
        after = (self.receiver.state, self.receiver.segments, self.receiver.written, self.receiver.deadline)
        assert after == before
        assert self.receiver.num_late == late + 1

    # What always holds

    @invariant()
    def ends_once(self) -> None:
        if hasattr(self, "outcomes"):
            assert len(self.outcomes) == self.receiver.ended
            assert len(self.sender_outcomes) == self.sender.ended
            assert (self.receiver.state is ReceiverState.COMMITTED) == (self.outcomes == ["committed"])

    def teardown(self) -> None:
        if not hasattr(self, "outcomes"):
            return
        begun = self.now
        healthy = (
            self.lossless
            and self.waited_s < 1.0
            and self.connected
            and not self.receiver.ended
            and not self.sender.ended
        )
        while not (self.receiver.ended and self.sender.ended):
            assert self.now < begun + DEADLINE_S + LEASE_S, "both sides end, whatever happened"
            self.settle()
        assert not self.writing or self.receiver.state is ReceiverState.FAILED
        if healthy:
            assert self.outcomes == ["committed"]
            assert self.sender_outcomes == ["acked"]

    def settle(self) -> None:
        """From here on nothing is disturbed."""
        if self.unshipped and not self.sender.ended:
            self.ship()
        elif self.sender.state is SenderState.SHIPPING:
            self.commit()
        self.renew()
        for _ in range(len(self.to_receiver)):
            self.receive(self.to_receiver.pop(0))
        for start in sorted(self.writing):
            self.complete(start, written=True)
        for _ in range(len(self.to_sender)):
            self.send(self.to_sender.pop(0))
        self.pass_time(0.4)


TestTransferEnds = TransferEnds.TestCase
TestTransferEnds.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
