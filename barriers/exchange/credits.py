"""CORE: credit-based flow control of one channel, decided by its receiver.

`credit = allocated - (sent - consumed)`, in bytes and in batches. Announcements carry absolute counts, so one that is
lost, repeated or late does no harm. Events need no credit; they keep their place behind the batches in front of them.

Bytes come back as rows are processed, a batch when its last row was. The allocation may move (debloat.py). A smaller one takes
nothing back of what was granted: what may arrive is bounded by the highest `consumed + allocated` that was ever announced."""

from __future__ import annotations

import msgspec

from holdfast.barriers.exchange.debloat import ChannelBudget
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError

ANNOUNCE_FRACTION = 4
"""The receiver announces when a quarter of the allocation was consumed since its last announcement, or its queue runs empty."""

SPLITS_REQUESTED_MAX = 2**31 - 1
"""Splits that one reader asks for in one attempt, at most."""


class CreditAnnouncement(msgspec.Struct, frozen=True, array_like=True, tag="credit"):
    """Announcement of a channel's receiver: what it grants, and what it has consumed since the attempt began; sizes in bytes."""

    allocated_bytes: int
    allocated_batches: int
    consumed_bytes: int
    consumed_batches: int
    splits_requested: int = 0
    """Of a channel from a split enumerator to a reader: splits that the reader has asked for since the attempt began."""


class SenderCredit:
    """The sender's side: how much may still be sent. Before the first announcement nothing, events included."""

    __slots__ = ("_bound_bytes", "_granted", "_sent_batches", "_sent_bytes", "splits_requested")

    def __init__(self) -> None:
        self._granted: CreditAnnouncement | None = None
        self._bound_bytes = 0
        """Bytes that may ever have been sent by now: the highest `consumed + allocated` that was announced."""
        self._sent_bytes = 0
        self._sent_batches = 0
        self.splits_requested = 0
        """The highest count that was announced."""

    @property
    def is_open(self) -> bool:
        """True once the receiver has announced itself."""
        return self._granted is not None

    @property
    def allocated_bytes(self) -> int | None:
        """The allocation as announced; None before."""
        return None if self._granted is None else self._granted.allocated_bytes

    @property
    def bytes_in_flight_max(self) -> int:
        """What `bytes_in_flight` may be, unless it is a single batch; more than the allocation while that shrinks."""
        return self._bound_bytes - (self._granted.consumed_bytes if self._granted else 0)

    @property
    def bytes_in_flight(self) -> int:
        """Sent and not known to be consumed."""
        return self._sent_bytes - (self._granted.consumed_bytes if self._granted else 0)

    @property
    def batches_in_flight(self) -> int:
        return self._sent_batches - (self._granted.consumed_batches if self._granted else 0)

    def announced(self, announcement: CreditAnnouncement) -> None:
        """Take an announcement; one older than what is known is ignored.

        Raises ProtocolError if it consumed more than was sent, or asks for a number of splits that is none."""
        if announcement.consumed_bytes > self._sent_bytes or announcement.consumed_batches > self._sent_batches:
            raise ProtocolError(
                f"the receiver consumed {announcement.consumed_bytes} bytes in {announcement.consumed_batches} batches, "
                f"but {self._sent_bytes} in {self._sent_batches} were sent",
                expected=self._sent_batches,
                got=announcement.consumed_batches,
            )
        if not 0 <= announcement.splits_requested <= SPLITS_REQUESTED_MAX:
            raise ProtocolError(
                f"the receiver asks for {announcement.splits_requested} splits",
                expected=SPLITS_REQUESTED_MAX,
                got=announcement.splits_requested,
            )
        self.splits_requested = max(self.splits_requested, announcement.splits_requested)
        known = self._granted
        if known is None or (
            announcement.consumed_batches >= known.consumed_batches and announcement.consumed_bytes >= known.consumed_bytes
        ):
            self._granted = announcement
            self._bound_bytes = max(self._bound_bytes, announcement.consumed_bytes + announcement.allocated_bytes)

    def can_send(self, size: int) -> bool:
        """True if a batch of `size` bytes fits, or if nothing is in flight: one batch may always pass, whatever its size."""
        if self._granted is None:
            return False
        if self.batches_in_flight == 0:
            return True
        return (
            self.batches_in_flight < self._granted.allocated_batches
            and self.bytes_in_flight + size <= self._granted.allocated_bytes
        )

    def sent(self, size: int) -> None:
        """A batch of `size` bytes was sent; the caller has checked `can_send`."""
        self._sent_bytes += size
        self._sent_batches += 1


class ReceiverCredit:
    """The receiver's side: what it granted, received and consumed, and when to announce it."""

    __slots__ = (
        "_announced_allocation", "_announced_batches", "_announced_bytes", "_bound_bytes", "_consumed_batches", "_consumed_bytes",
        "_deployed", "_has_new_request", "_received_batches", "_received_bytes", "_splits_requested", "allocated_batches",
        "allocated_bytes", "budget",
    )  # fmt: skip

    def __init__(self, *, allocated_bytes: int, allocated_batches: int, budget: ChannelBudget | None = None) -> None:
        """`budget`: moves the allocation, and has its first value; None: it stays as it is."""
        if allocated_bytes < 1 or allocated_batches < 1:
            raise InvalidConfigError(f"credit must be at least 1 byte and 1 batch, got {allocated_bytes} and {allocated_batches}")
        self.budget = budget
        self.allocated_bytes = allocated_bytes if budget is None else budget.allocated_bytes
        self.allocated_batches = allocated_batches
        self._bound_bytes = self.allocated_bytes
        """Bytes that may ever have come by now: the highest `consumed + allocated` that was announced."""
        self._received_bytes = self._received_batches = 0
        self._consumed_bytes = self._consumed_batches = 0
        self._announced_bytes = self._announced_batches = 0
        self._announced_allocation = self.allocated_bytes
        self._deployed = False
        self._splits_requested = 0
        self._has_new_request = False

    @property
    def bytes_held(self) -> int:
        """Received and not processed; at most `bytes_held_max`, or one batch of any size."""
        return self._received_bytes - self._consumed_bytes

    @property
    def batches_held(self) -> int:
        return self._received_batches - self._consumed_batches

    @property
    def bytes_held_max(self) -> int:
        """What `bytes_held` may be, unless it is a single batch; more than the allocation while that shrinks."""
        return self._bound_bytes - self._consumed_bytes

    @property
    def overshoot_bytes(self) -> int:
        """What is held beyond the allocation: it has shrunk, or a row is larger."""
        return max(0, self.bytes_held - self.allocated_bytes)

    @property
    def time_to_consume_ms(self) -> int | None:
        """Estimate for what is held, by the rate of the last periods; None where no rate is known."""
        rate = None if self.budget is None else self.budget.bytes_per_s
        return None if rate is None else round(1000 * self.bytes_held / rate)

    def received(self, size: int) -> None:
        """A batch came. Raises ProtocolError if the sender had no credit for it."""
        self._received_bytes += size
        self._received_batches += 1
        if self.batches_held == 1:
            return
        if self._received_bytes > self._bound_bytes or self.batches_held > self.allocated_batches:
            raise ProtocolError(
                f"a batch came without credit: {self.bytes_held} of {self.bytes_held_max} bytes, "
                f"{self.batches_held} of {self.allocated_batches} batches are held",
                expected=self.bytes_held_max,
                got=self.bytes_held,
            )

    def consumed(self, size: int, *, batches: int = 1, now_s: float = 0.0, unit_bytes: int = 0) -> None:
        """So many bytes of the oldest batch were processed; `batches`: 1 with the last of them, 0 before. `now_s` and `unit_bytes`
        are for the budget."""
        self._consumed_bytes += size
        self._consumed_batches += batches
        budget = self.budget
        if budget is not None and budget.processed(size, now_s, unit_bytes):
            self.allocated_bytes = budget.allocated_bytes

    def request_splits(self, total: int) -> bool:
        """The reader has asked for so many splits since the attempt began. Whether that is to be announced."""
        if total > self._splits_requested:
            self._splits_requested = min(total, SPLITS_REQUESTED_MAX)
            self._has_new_request = True
        return self._has_new_request

    def repeat_request(self) -> bool:
        """Announce once more what was asked for, since an announcement may be lost. Whether there is anything."""
        self._has_new_request = self._has_new_request or self._splits_requested > 0
        return self._has_new_request

    def take_announcement(self) -> CreditAnnouncement | None:
        """The announcement for the sender, or None while too little was consumed to be worth a message.

        The first call always announces: it opens the channel. So does an empty queue, since its sender may be waiting to send a
        batch larger than the rest of its credit, and so does another allocation."""
        bytes_moved = self._consumed_bytes - self._announced_bytes
        batches_moved = self._consumed_batches - self._announced_batches
        if self._deployed and not self._has_new_request and self.allocated_bytes == self._announced_allocation:
            if bytes_moved == batches_moved == 0:
                return None
            worthwhile = (
                bytes_moved * ANNOUNCE_FRACTION >= self.allocated_bytes
                or batches_moved * ANNOUNCE_FRACTION >= self.allocated_batches
                or self.batches_held == 0
            )
            if not worthwhile:
                return None
        self._deployed = True
        self._has_new_request = False
        self._announced_bytes = self._consumed_bytes
        self._announced_batches = self._consumed_batches
        self._announced_allocation = self.allocated_bytes
        self._bound_bytes = max(self._bound_bytes, self._consumed_bytes + self.allocated_bytes)
        return CreditAnnouncement(
            self.allocated_bytes, self.allocated_batches, self._consumed_bytes, self._consumed_batches, self._splits_requested
        )
