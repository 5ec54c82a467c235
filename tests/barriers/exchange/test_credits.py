"""Credit of one channel: bounded in flight, never stuck, whatever the sizes and the delays."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.barriers.exchange.credits import CreditAnnouncement, ReceiverCredit, SenderCredit
from holdfast.barriers.exchange.debloat import ChannelBudget, DebloatSettings
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError
from tests.examples import examples


@pytest.mark.parametrize(("size", "batches"), [(0, 1), (1, 0), (-1, 1)])
def test_an_empty_allocation_is_refused(size: int, batches: int) -> None:
    with pytest.raises(InvalidConfigError):
        ReceiverCredit(allocated_bytes=size, allocated_batches=batches)


def test_more_consumed_than_sent_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="consumed 5 bytes in 1 batches"):
        SenderCredit().announced(CreditAnnouncement(100, 4, 5, 1))


def test_more_than_granted_is_a_protocol_error() -> None:
    receiver = ReceiverCredit(allocated_bytes=100, allocated_batches=2)
    receiver.received(60)
    receiver.received(40)
    with pytest.raises(ProtocolError, match="3 of 2 batches"):
        receiver.received(0)


def test_nothing_may_be_sent_before_the_receiver_speaks() -> None:
    sender = SenderCredit()
    assert not sender.is_open
    assert not sender.can_send(0)
    sender.announced(CreditAnnouncement(10, 1, 0, 0))
    assert sender.is_open
    assert sender.can_send(1_000_000)


def test_bytes_and_batches_both_bound() -> None:
    sender = SenderCredit()
    sender.announced(CreditAnnouncement(100, 3, 0, 0))
    sender.sent(60)
    assert sender.can_send(40)
    assert not sender.can_send(41)
    sender.sent(1)
    sender.sent(1)
    assert not sender.can_send(1)


def test_an_old_announcement_takes_nothing_back() -> None:
    sender = SenderCredit()
    sender.announced(CreditAnnouncement(100, 3, 0, 0))
    sender.sent(100)
    sender.announced(CreditAnnouncement(100, 3, 100, 1))
    sender.announced(CreditAnnouncement(100, 3, 0, 0))
    assert (sender.bytes_in_flight, sender.batches_in_flight) == (0, 0)


def test_announcements_are_coalesced() -> None:
    receiver = ReceiverCredit(allocated_bytes=1000, allocated_batches=100)
    assert receiver.take_announcement() == CreditAnnouncement(1000, 100, 0, 0)
    for _ in range(10):
        receiver.received(50)
    spoken = []
    for _ in range(10):
        receiver.consumed(50)
        if (announcement := receiver.take_announcement()) is not None:
            spoken.append(announcement.consumed_bytes)
    assert spoken == [250, 500]
    receiver.received(1)
    receiver.consumed(1)
    assert receiver.take_announcement() == CreditAnnouncement(1000, 100, 501, 11)
    assert receiver.take_announcement() is None


def test_bytes_come_back_in_parts_and_the_batch_with_the_last_of_them() -> None:
    receiver, sender = ReceiverCredit(allocated_bytes=100, allocated_batches=1), SenderCredit()
    sender.announced(announced(receiver))
    sender.sent(100)
    receiver.received(100)
    receiver.consumed(60, batches=0)
    sender.announced(announced(receiver))
    assert (sender.bytes_in_flight, sender.batches_in_flight, sender.can_send(1)) == (40, 1, False)
    receiver.consumed(40)
    sender.announced(announced(receiver))
    assert (sender.bytes_in_flight, sender.batches_in_flight, sender.can_send(1_000)) == (0, 0, True)


def test_a_smaller_allocation_takes_nothing_back_of_what_was_granted() -> None:
    moves = Moves(1_000)
    receiver, sender = ReceiverCredit(allocated_bytes=1, allocated_batches=100, budget=moves), SenderCredit()
    sender.announced(announced(receiver))
    sender.sent(100)
    receiver.received(100)
    moves.allocated_bytes = 50
    receiver.consumed(100)
    assert receiver.take_announcement() == CreditAnnouncement(50, 100, 100, 1)
    for _ in range(9):  # sent before the sender knew
        assert sender.can_send(100)
        sender.sent(100)
        receiver.received(100)
    assert (receiver.bytes_held, receiver.bytes_held_max, receiver.overshoot_bytes) == (900, 900, 850)
    assert not sender.can_send(100)
    with pytest.raises(ProtocolError, match="901 of 900 bytes"):
        receiver.received(1)


def test_another_allocation_is_announced_at_once() -> None:
    moves = Moves(1_000)
    receiver = ReceiverCredit(allocated_bytes=1, allocated_batches=100, budget=moves)
    announced(receiver)
    for _ in range(2):
        receiver.received(10)
    receiver.consumed(10)
    assert receiver.take_announcement() is None
    moves.allocated_bytes = 2_000
    receiver.consumed(1, batches=0)
    assert receiver.take_announcement() == CreditAnnouncement(2_000, 100, 11, 1)
    assert receiver.take_announcement() is None


def announced(receiver: ReceiverCredit) -> CreditAnnouncement:
    announcement = receiver.take_announcement()
    assert announcement is not None
    return announcement


class Moves(ChannelBudget):
    """Gives the allocation that a test wants."""

    def __init__(self, allocated_bytes: int) -> None:
        super().__init__(DebloatSettings(0.2, 0.2, allocated_bytes, 2**22))

    def processed(self, size: int, now_s: float, unit_bytes: int = 0) -> bool:
        return True


class CreditMachine(RuleBasedStateMachine):
    """A sender and a receiver over two ordered, lossless lines of any delay; announcements may also be lost or repeated
    as long as a later one arrives. The allocation moves at any time, a batch is processed in parts, the channel may be blocked."""

    @initialize(allocated=st.integers(1, 100), batches=st.integers(1, 5))
    def deploy(self, allocated: int, batches: int) -> None:
        self.moves = Moves(allocated)
        self.receiver = ReceiverCredit(allocated_bytes=1, allocated_batches=batches, budget=self.moves)
        self.sender = SenderCredit()
        self.waiting: deque[int] = deque()
        self.data: deque[int] = deque()
        self.credit: deque[CreditAnnouncement] = deque()
        self.queue: deque[int] = deque()
        self.left = 0
        """Of the first of the queue, which is in hand."""
        self.blocked = False
        self.largest = 0
        self.sent: list[int] = []
        self.taken: list[int] = []
        self.granted = 0
        """The highest `consumed + allocated` that was announced."""
        self.speak()

    def speak(self) -> None:
        if (announcement := self.receiver.take_announcement()) is not None:
            self.credit.append(announcement)
            self.granted = max(self.granted, announcement.consumed_bytes + announcement.allocated_bytes)

    @rule(size=st.one_of(st.integers(0, 150), st.integers(1_000, 100_000)))
    def produce(self, size: int) -> None:
        self.waiting.append(size)

    @rule()
    def send(self) -> None:
        if self.waiting and self.sender.can_send(self.waiting[0]):
            size = self.waiting.popleft()
            self.sender.sent(size)
            self.largest = max(self.largest, size)
            self.data.append(size)
            self.sent.append(size)

    @rule()
    def deliver(self) -> None:
        if self.data:
            size = self.data.popleft()
            self.receiver.received(size)
            self.queue.append(size)

    @rule(blocked=st.booleans())
    def block(self, blocked: bool) -> None:
        self.blocked = blocked

    @rule(allocated=st.integers(1, 300))
    def move(self, allocated: int) -> None:
        self.moves.allocated_bytes = allocated

    @rule(share=st.integers(1, 4))
    def consume(self, share: int) -> None:
        if not self.queue or self.blocked:
            return
        size = self.queue[0]
        self.left = self.left or size
        part = self.left if share == 4 else min(self.left, size * share // 4)
        self.left -= part
        self.receiver.consumed(part, batches=int(self.left == 0))
        if self.left == 0:
            self.taken.append(self.queue.popleft())
        self.speak()

    @rule(repeat=st.booleans())
    def announce(self, repeat: bool) -> None:
        if self.credit:
            announcement = self.credit[0] if repeat else self.credit.popleft()
            self.sender.announced(announcement)

    @precondition(lambda self: len(self.credit) > 1)
    @rule()
    def lose_an_announcement_that_a_later_one_covers(self) -> None:
        self.credit.popleft()

    @invariant()
    def in_flight_is_bounded(self) -> None:
        consumed = sum(self.taken) + (self.queue[0] - self.left if self.left else 0)
        in_flight = sum(self.data) + sum(self.queue) - (self.queue[0] - self.left if self.left else 0)
        batches = len(self.data) + len(self.queue)
        assert batches <= 1 or consumed + in_flight <= self.granted
        assert batches <= self.receiver.allocated_batches
        assert self.sender.bytes_in_flight >= in_flight
        assert self.sender.batches_in_flight <= 1 or self.sender.bytes_in_flight <= self.sender.bytes_in_flight_max

    @invariant()
    def order_is_kept(self) -> None:
        assert self.taken == self.sent[: len(self.taken)]

    def teardown(self) -> None:
        """No deadlock: with everyone running, all that was produced arrives, however small the allocation has become."""
        if not hasattr(self, "waiting"):
            return
        self.moves.allocated_bytes = 1
        self.blocked = False
        for _ in range(10 * (len(self.waiting) + len(self.sent)) + 20):
            self.announce(repeat=False)
            self.send()
            self.deliver()
            self.consume(4)
        assert [*self.waiting, *self.data, *self.queue] == []
        assert self.taken == self.sent


TestCredit = CreditMachine.TestCase
TestCredit.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
